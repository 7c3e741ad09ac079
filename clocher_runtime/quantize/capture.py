"""Run a model over calibration text, layer by layer, showing every linear's input.

A layer is the calls of the model's Plan on the CPU back end, with fp32 activations; experts run one
after another. The weights of one layer are bound, as they are stored, and of an expert decoded;
hidden states live in an unnamed temporary file.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format
from clocher_kernels.ops import OPS, of_experts, written
from clocher_kernels.ops.rewrite import CODES
from clocher_kernels.plan import Call, Executor, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.rounding import look_up
from clocher_runtime.engine.backends import make_executor
from clocher_runtime.engine.load import Weights, describe, destined, vector
from clocher_runtime.models.build import PAGE_CELLS, Sizes, build_plan, lay_out
from clocher_runtime.quantize.calibration_text import Text

CHUNK_TOKENS = 2048
"""Tokens per chunk; longer sequences are a chunk of their own."""

_LOGITS = 1 << 26
_READ = ("x", "times", "q", "k", "v", "slots", "positions")

Buffers = Mapping[str, np.ndarray]

ExpertInputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs x [m, K] and gated [m, I] of an expert's matmuls, and weights of its outputs [m]."""
Tape = list[tuple[Call, Buffers]]
"""Calls in order, and copies of what their parameters of `_READ` were before them."""
Hidden = Callable[[np.ndarray], np.ndarray]
"""Tokens [m] of a layer -> an expert's gated hidden layer [m, I]."""


class RowStore:
    """An fp32 array [rows, columns] in an unnamed temporary file; items of it are copies."""

    def __init__(self, rows: int, columns: int) -> None:
        nbytes = max(1, rows * columns * 4)
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self.array = np.frombuffer(self._map, np.float32).reshape(rows, columns)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self.array[rows].copy()

    def __setitem__(self, rows: slice | np.ndarray, values: np.ndarray) -> None:
        self.array[rows] = values

    def take(self, other: "RowStore") -> None:
        """Become a copy of another store of the same shape."""
        self.array[:] = other.array
        self.release()
        other.release()

    def release(self) -> None:
        """Let the kernel drop the resident pages; the data stays."""
        self._map.madvise(mmap.MADV_DONTNEED)


class Observer:
    """Receives the inputs while a layer is computed; `rows` are tokens."""

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the linears with these weights."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        """Take the inputs of an expert's two matmuls for the next tokens that are routed to it."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: Hidden) -> None:
        """Note that an expert has received all its tokens."""


class Walk:
    """A float forward pass over sequences, advanced layer by layer."""

    def __init__(self, checkpoint: Checkpoint, text: Text, threads: int = 1) -> None:
        self.checkpoint, self.text = checkpoint, text
        self.spec, self._needs = describe(checkpoint)
        if max(text.ids) >= self.spec.vocab_size:
            raise UsageError(
                f"token {max(text.ids)} in the calibration text; the model's vocabulary has "
                f"{self.spec.vocab_size}; tokenise the text with the model's tokenizer"
            )
        self._config = EngineConfig(backend="cpu", threads=threads)
        becomes = destined(self.spec, self._needs, checkpoint)
        # Inputs are shown as they are, not rotated.
        self._formats: dict[str, Format] = {
            name: Float("f32") if each.format.turned else each.format
            for name, each in becomes.items()
            if each.format
        }
        chunks = list(text.chunks(CHUNK_TOKENS))
        sizes = Sizes(
            tokens=max(rows.stop - rows.start for rows, _ in chunks),
            rows=max(1, min(len(text.ids), _LOGITS // self.spec.vocab_size)),
            slots=max(len(lengths) for _, lengths in chunks),
            context=max(text.lengths),
            pages=max(int(_pages(lengths).sum()) for _, lengths in chunks),
        )
        self.plan = build_plan(self.spec, self._formats, sizes)
        self._of_expert = self.plan
        if self.spec.moe is not None:  # as if a token chose one expert
            one = replace(self.spec, moe=replace(self.spec.moe, active=1))
            self._of_expert = lay_out(one, self._formats, replace(sizes, tokens=CHUNK_TOKENS))
        calls = self.plan.calls
        ends = {-1: 1}  # after the call that embeds; a layer ends with the last weight of its name
        for number, call in enumerate(calls):
            for name in call.args.values():
                if name.startswith("model.layers."):
                    ends[int(name.split(".")[2])] = number + 1
        self._layers = [calls[a:b] for a, b in pairwise(ends.values())]
        ops = [call.op for call in calls]
        self._head = calls[ops.index("gather_rows") + 1 : ops.index("sample")]
        self.state, self._next = self.store(), self.store()
        self._expert_inputs = self.store() if self.spec.moe else None
        self._overlay: Mapping[str, QuantTensor] = {}
        # Matrix -> how much each token counts, [T]; see `gradients`. Without it all count alike.
        self.counts: Mapping[str, np.ndarray] = {}
        self.restart()

    def store(self, columns: int = 0) -> RowStore:
        """Return room for a row of each token; by default for hidden states."""
        return RowStore(len(self.text.ids), columns or self.spec.hidden_size)

    def matrices(self, layer: int) -> list[str]:
        """Return the names of a layer's matrices."""
        return [call.args["w"] for call in self._layers[layer] if _multiplies(call)]

    def restart(self) -> None:
        """Embed the text: the state before layer 0."""
        with closing(self._bind(self.plan, self.plan.calls[:1])) as executor:
            for rows, inputs in self._chunks():
                self.state[rows] = _run(executor, inputs)["h"]
        self.checkpoint.release()

    def layer(
        self,
        index: int,
        observer: Observer | None = None,
        weights: Mapping[str, QuantTensor] | None = None,
    ) -> None:
        """Compute a layer from the state, showing inputs; `weights` replace the checkpoint's."""
        self._overlay = weights or {}
        calls = self._layers[index]
        shown = _shared_inputs(calls) if observer else {}
        # Experts add to the hidden states last; a shared expert may well add to them before.
        experts = [call for call in calls if of_experts(call)]
        routed: list[tuple[np.ndarray, np.ndarray]] = []
        with closing(self._bind(self.plan, [c for c in calls if not of_experts(c)])) as executor:
            for rows, inputs in self._chunks():
                seen: list[tuple[tuple[str, ...], np.ndarray]] = []

                def note(call: Call, buffers: Buffers, seen: list[Any] = seen) -> None:
                    if names := shown.get(call.args.get("w", "")):
                        seen.append((names, buffers[_source(call)].copy()))

                buffers = _run(executor, {**inputs, "h": self.state[rows]}, note)
                self._next[rows] = buffers["h"]
                # Threads of BLAS spin for a while after a product, so not between the calls.
                if observer:
                    for names, x in seen:
                        observer.linear(names, x, rows)
                if experts and self._expert_inputs:
                    self._expert_inputs[rows] = buffers[_source(experts[0])]
                    routed.append((buffers["experts"].copy(), buffers["expert_weights"].copy()))
                self.state.release()
                self._next.release()
        if routed and self._expert_inputs:
            ids, chosen = map(np.concatenate, zip(*routed, strict=True))
            self._experts(experts, self._expert_inputs, ids, chosen, observer or Observer())
        self._overlay = {}
        self.checkpoint.release()

    def advance(self) -> None:
        """Make the last `layer` result the state."""
        self.state, self._next = self._next, self.state

    def layers(self, indices: Iterable[int], observer: Observer | None = None) -> None:
        """Advance through layers, showing inputs."""
        for index in indices:
            self.layer(index, observer)
            self.advance()

    def logits(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (rows, logits [m, V]) after the last layer; the next rows overwrite them."""
        for rows, buffers in self._after(self._head):
            yield rows, buffers["logits"]

    def head_inputs(self, observer: Observer) -> None:
        """Show the inputs of the output head after the last layer."""
        *before, head = self._head
        for rows, buffers in self._after(before):
            observer.linear((head.args["w"],), buffers[_source(head)], rows)

    def calls(self) -> list[Call]:
        """Return the calls of all layers, and of the head."""
        return [call for part in (*self._layers, self._head) for call in part]

    def replay(self, layer: int | None, state: RowStore) -> Iterator[tuple[slice, Tape, Buffers]]:
        """Compute a layer, or the head, of hidden states some tokens at a time.

        Yields the tokens, the calls with what they read, and all buffers after them.
        """
        calls = self._head if layer is None else self._layers[layer]
        given = self._chunks() if layer is not None else ((rows, {}) for rows in self._rows())
        with closing(self._bind(self.plan, calls)) as executor:
            for rows, inputs in given:
                tape: Tape = []

                def note(call: Call, buffers: Buffers, tape: Tape = tape) -> None:
                    there = {p: call.args[p] for p in _READ if call.args.get(p) in buffers}
                    tape.append((call, {p: buffers[name].copy() for p, name in there.items()}))

                buffers = _run(executor, {**inputs, calls[0].args["x"]: state[rows]}, note)
                yield rows, tape, buffers
                state.release()
        self.checkpoint.release()

    def vector(self, name: str) -> np.ndarray:
        """Return a vector or a rotary table by its name in the Plan."""
        found = self.plan.consts[name] if name in self.plan.consts else self._weight(name)
        assert isinstance(found, np.ndarray)
        return found

    def tensor(self, name: str) -> QuantTensor:
        """Return a matrix: replaced, ternarised or as stored."""
        if tensor := self._overlay.get(name):
            turned = tensor.format.turned
            return encode(tensor.decode(), Float("f32")) if turned else tensor
        tensor = self.checkpoint.tensor(name)
        fmt = self._formats.get(name, tensor.format)  # a tied head may be stored all the same
        return tensor if fmt.name == tensor.format.name else encode(tensor.decode(), fmt)

    def _chunks(self) -> Iterator[tuple[slice, Buffers]]:
        """Yield each chunk's rows and the inputs of its tokens: a slot is a sequence."""
        blocks = self.plan.buffers["pages"].shape[1]
        for rows, lengths in self.text.chunks(CHUNK_TOKENS):
            counts, positions = _pages(lengths), np.concatenate([*map(np.arange, lengths)])
            inputs = {
                "ids": self.text.ids[rows],
                "slots": np.repeat(np.arange(len(lengths)), lengths),
                "positions": positions,
                "ends": positions + 1,
                # Each has pages of its own first; of the others it reads nothing.
                "pages": (counts.cumsum() - counts)[:, None] + np.arange(blocks),
            }
            yield rows, inputs

    def _after(self, calls: Sequence[Call]) -> Iterator[tuple[slice, Buffers]]:
        """Run calls on the state, some rows at a time."""
        with closing(self._bind(self.plan, calls)) as executor:
            for rows in self._rows():
                yield rows, _run(executor, {calls[0].args["x"]: self.state[rows]})

    def _rows(self) -> Iterator[slice]:
        """Yield as many rows at a time as have logits."""
        for start in range(0, len(self.text.ids), self.plan.rows):
            yield slice(start, min(start + self.plan.rows, len(self.text.ids)))

    def _bind(self, plan: Plan, calls: Sequence[Call], weights: Weights | None = None) -> Executor:
        """Bind some calls of a Plan, by default with the weights of their names."""
        names = {name for call in calls for name in call.args.values()}
        part = replace(
            plan,
            buffers={name: buffer for name, buffer in plan.buffers.items() if name in names},
            weights=tuple(name for name in plan.weights if name in names),
            calls=tuple(calls),
        )
        values = weights or {name: self._weight(name) for name in part.weights}
        return make_executor(part, values, self._config)

    def _weight(self, name: str) -> np.ndarray | QuantTensor:
        need = self._needs[name]
        if need.kind == "vector":
            return vector(name, need, self.checkpoint.tensor(name))
        return self.tensor(name)

    def _experts(
        self,
        calls: Sequence[Call],
        inputs: RowStore,
        ids: np.ndarray,
        chosen: np.ndarray,
        observer: Observer,
    ) -> None:
        up, down = calls
        names = up.args["w"], down.args["w"]
        stacks = [
            {name: self._weight(name) for name in call.args.values() if name in self._needs}
            for call in calls
        ]
        for expert in range(self._needs[names[0]].shape[0]):
            tokens, places = np.nonzero(ids == expert)
            first, second = (
                self._bind(self._of_expert, [call], {n: _one(w, expert) for n, w in own.items()})
                for call, own in zip(calls, stacks, strict=True)
            )

            def hidden(
                rows: np.ndarray, weights: np.ndarray | None = None, first: Executor = first
            ) -> np.ndarray:
                weights = chosen[rows, 0] if weights is None else weights
                x = {_source(up): inputs[rows], "expert_weights": weights[:, None]}
                return _run(first, x)["gated"][:, 0]

            with closing(first), closing(second):
                for start in range(0, len(tokens), CHUNK_TOKENS):
                    rows = tokens[start : start + CHUNK_TOKENS]
                    weights = chosen[rows, places[start : start + CHUNK_TOKENS]]
                    gated = hidden(rows, weights)
                    of_output = weights if "weights" in down.args else np.ones_like(weights)
                    observer.expert(names, expert, (inputs[rows], gated, of_output), rows)
                    x = {"gated": gated[:, None], "expert_weights": weights[:, None]}
                    self._next[rows] = _run(second, {**x, "h": self._next[rows]})["h"]
                    inputs.release()
                    self._next.release()
                observer.expert_done(names, expert, hidden)
            self.checkpoint.release()


def _run(
    executor: Executor, inputs: Buffers, note: Callable[[Call, Buffers], None] | None = None
) -> Buffers:
    """Execute all calls for the rows of `inputs`, noting buffers before each; return these.

    They stay valid until the next run.
    """
    buffers = {name: executor.array(name) for name in executor.plan.buffers}
    for name in buffers.keys() & inputs.keys():
        buffers[name][: len(inputs[name])] = inputs[name]
    count = max(len(values) for name, values in inputs.items() if name != "pages")
    live = {name: buffer[:count] for name, buffer in buffers.items()}
    steps = executor.walk(count, count)
    for call in executor.plan.calls:
        if note:
            note(call, live)
        next(steps)
    return live


def _pages(lengths: Sequence[int]) -> np.ndarray:
    """Return the pages of the KV cache that each sequence takes, [S]."""
    return -(-np.array(lengths) // PAGE_CELLS)


def _one(stack: np.ndarray | QuantTensor, expert: int) -> np.ndarray | QuantTensor:
    """Return an expert's part of its layer's matrices [E, N, K] or biases [E, N], E = 1."""
    if isinstance(stack, np.ndarray):
        return stack[expert : expert + 1]
    return encode(look_up(stack, expert)[None], Float("f32"))


def _source(call: Call) -> str:
    """Return a matmul's float input buffer."""
    return call.args["x"].removesuffix(CODES)


def _multiplies(call: Call) -> bool:
    return call.op == "linear" or of_experts(call)


def _shared_inputs(calls: Sequence[Call]) -> dict[str, tuple[str, ...]]:
    """Return, by the first weight that multiplies an input, the weights that share it."""
    first: dict[str, str] = {}
    members: dict[str, tuple[str, ...]] = {}
    for call in calls:
        if _multiplies(call) and OPS[call.op].param("x").dims == "M K":
            weight = call.args["w"]
            start = first.setdefault(_source(call), weight)
            members[start] = (*members.get(start, ()), weight)
        for name in written(call):
            first.pop(name, None)
    return members
