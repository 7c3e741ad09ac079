"""The stub back end: token ids depend on the prompt only, for tests of tools. Executes no calls."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.engine.load import Model, Weights
from clocher_runtime.engine.probes import WorkTouch
from clocher_runtime.models.inventory import EMBED, NORM
from clocher_runtime.models.spec import ModelSpec, RopeSpec

VOCAB_SIZE = 32768
"""Ids that it draws, unless a model has fewer."""
CONTEXT = 1 << 24
"""Cells of a sequence. None is stored, so there may be many."""


def stub_id(prompt: Sequence[int], index: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Return token `index` of the continuation of a prompt.

    SHA-256 of the ASCII text "<ids>:<index>" (decimal, comma-separated), first four bytes,
    big-endian, modulo `vocab_size`.
    """
    text = f"{','.join(map(str, prompt))}:{index}"
    return int.from_bytes(sha256(text.encode("ascii")).digest()[:4], "big") % vocab_size


def stub_model() -> Model:
    """Return the stub's model, which accepts any id and has no layers."""
    spec = ModelSpec(
        family="stub",
        vocab_size=1 << 31,
        hidden_size=1,
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        windows=(),
        rope=RopeSpec(theta=1.0),
        max_positions=CONTEXT,
        norm_eps=1.0,
        tied=True,
    )
    table = encode(np.zeros((1, 1), np.float32), parse_format("f32"))
    weights: Weights = {EMBED: table, NORM: np.zeros(1, np.float32)}
    nothing = Checkpoint(Path(), "callable", {}, {}, ())
    return Model(spec, weights, nothing, precision="none", bytes_per_token=0)


class StubExecutor(ReferenceExecutor):
    """Draws the tokens of `stub_id`; allocates only the inputs of its Plan, of any model."""

    name = "stub"
    isa = "none"

    def __init__(self, plan: Plan) -> None:
        inputs = {name: each for name, each in plan.buffers.items() if each.role == "input"}
        inputs["pages"] = replace(inputs["pages"], shape=(inputs["pages"].shape[0], 1))
        for name in ("allowed", "edit_ids", "edits"):
            shape = (0,) * len(inputs[name].shape)
            inputs[name] = replace(inputs[name], shape=shape)
        super().__init__(replace(plan, buffers=inputs, consts={}, weights=()), {})
        self._sampled = np.zeros(plan.rows, np.int32)
        self._vocab_size = min(plan.buffers["logits"].shape[1], VOCAB_SIZE)
        self._prompts: dict[int, list[int]] = defaultdict(list)

    def step(self, tokens: int, rows: int) -> None:
        """Read prompt tokens, and draw one token for each output row."""
        ids, slots, positions, ends = map(self.array, ("ids", "slots", "positions", "ends"))
        wanted, draws = self.array("rows")[:rows], self.array("draws")[:rows]
        drawn = list(zip(wanted.tolist(), draws.tolist(), strict=True))
        for token in sorted({*range(tokens)} - {token for token, index in drawn if index}):
            at = int(positions[token])
            self._prompts[int(slots[token])][at:] = [int(ids[token])]
        for row, (token, index) in enumerate(drawn):
            made = stub_id(self._prompts[int(slots[token])], index, self._vocab_size)
            self._sampled[row] = ids[token] = made
            positions[token] += 1
            ends[token] += 1
        draws += 1

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Return the tokens of the last step. Raises UsageError."""
        if name != "sampled":
            raise UsageError("the stub has no logits; leave out --trace-topk")
        return self._sampled[:count]

    def work_touch(self, bytes_per_token: int, stride: int) -> WorkTouch:
        """Return a disabled work-touch: there are no weights."""
        return WorkTouch((), 0, stride)
