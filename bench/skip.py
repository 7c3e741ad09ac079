"""Dead neurons of a squared ReLU: how many each layer has, and what not reading them saves.

    python -m bench.skip --model-dir DIR [--plant 80] [--threads N] [--tokens 32] [--json FILE]

A row for each layer says how many of its gates are zero, and how many of the codes that its down
projection is multiplied by, which are zero too where the hidden layer is small. They are counted in
decode steps of a random prompt. A row for the MLPs and one for the step compare a session that
skips with one that reads everything (--pretranspose woh), taking turns, beside the bandwidth of
reading memory. "same" says that both gave the same tokens.

--plant makes so many per cent of the gates zero: a tenth of the channels of the stream becomes a
constant, which rows of the gates lean against, and what the layers add to the stream becomes small.
Which neurons live then depends on the token. The text is worth nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import click
import numpy as np

from bench.bandwidth import MIB, PAGES_READ
from bench.decode import Runner
from bench.measure import NotMeasured, ratio
from bench.ops.experiment import MODEL_DIR, TEAM, Row, experiment, opened, turns
from bench.profile import Profiler, Step, median_step
from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.formats import Ternary
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.inventory import EMBED, layer_name
from cpu_fallback.team.bandwidth import Reader

DENSE = "woh"
"""What --pretranspose is where nothing is skipped."""
_PROMPT = 16
_SMALL = np.float32(2**-12)


def planted(model: Model, percent: float, seed: int = 0) -> Model:
    """Return a model of whose gates so many per cent are zero."""
    spec, rng = model.spec, np.random.default_rng(seed)
    weights = dict(model.weights)
    constant = rng.choice(spec.hidden_size, spec.hidden_size // 10, replace=False)
    table = weights[EMBED]
    values = table.decode()
    values[:, constant] = np.sqrt(np.square(values).mean())
    weights[EMBED] = encode(values, table.format)
    for layer in range(spec.num_layers):
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            name = layer_name(layer, name)
            weights[name] = _scaled(weights[name], _SMALL)
        name = layer_name(layer, "mlp.gate_proj.weight")
        weights[name] = _leaning(weights[name], constant, percent, rng)
    return replace(model, weights=weights)


def _scaled(weight: QuantTensor, factor: np.float32) -> QuantTensor:
    assert isinstance(weight.format, Ternary)
    dtype = weight.format.scale_dtype
    factor = 1 / factor if weight.format.inverse else factor
    scale = from_f32(to_f32(weight.planes["scale"], dtype) * factor, dtype)
    return replace(weight, planes={"codes": weight.planes["codes"].copy(), "scale": scale})


def _leaning(
    weight: QuantTensor, constant: np.ndarray, percent: float, rng: np.random.Generator
) -> QuantTensor:
    """Return gates whose weights of the constant channels have a mean below zero."""
    assert isinstance(weight.format, Ternary)
    digits = weight.format.codes(weight.planes, weight.shape)
    often = float(np.mean(digits != 0))
    spread = (weight.shape[1] * often) ** 0.5
    lean = NormalDist().inv_cdf(percent / 100) * spread / len(constant)
    chances = [(often + lean) / 2, 1 - often, (often - lean) / 2]
    if min(chances) < 0:
        raise NotMeasured(f"--plant {percent}: no weights lean so far; expected 5 to 95")
    shape = (len(digits), len(constant))
    digits[:, constant] = rng.choice(np.array([-1, 0, 1], np.int8), shape, p=chances)
    rows = (digits + 1).astype(np.uint8).reshape(4, -1, weight.shape[1])
    codes = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
    return replace(weight, planes={"codes": codes, "scale": weight.planes["scale"].copy()})


def zeros_by_layer(session: Session, tokens: int) -> list[tuple[float, float]]:
    """Return for each layer the share of gates that are zero, and of the codes that are.

    Raises:
        NotMeasured: the model has no squared ReLU whose zeros are skipped.
    """
    executor: Any = session.executor
    plan: Plan = executor.plan
    seen: dict[str, list[list[float]]] = {"relu2_gate_up": [], "skip_linear": []}
    if not any(call.op in seen for call in plan.calls):
        raise NotMeasured("this model has no ternary MLP with a squared ReLU")
    prompt = np.random.default_rng(0).integers(session.model.spec.vocab_size, size=_PROMPT)
    for _ in session.generate([prompt.tolist()], 1, stop_ids=frozenset()):
        pass
    for _ in range(tokens):
        found: dict[str, list[float]] = {op: [] for op in seen}
        for call in executor.walk(1, 1):
            if call.op in seen:
                array = executor.array(call.args["y" if call.op == "relu2_gate_up" else "x"])
                found[call.op].append(float(np.mean(array[0] == 0)))
        for op, shares in found.items():
            seen[op].append(shares)
    gates, codes = (np.mean(seen[op], axis=0) for op in seen)
    return list(zip(gates.tolist(), codes.tolist(), strict=True))


def mlp_us(step: Step) -> float:
    """Return the time of all MLPs in a step, norms and waiting included, in microseconds."""
    total, inside = 0.0, False
    for call in step.calls:
        inside |= "post_attention_layernorm" in call.name
        total += (call.ns + call.waiting_ns) * inside
        inside &= "down_proj" not in call.name
    return total / 1e3


@experiment(
    "skip",
    __doc__,
    "test | zero gates | zero codes | skipping | dense | x | same",
    "{test} | {zero_gates:.1%} | {zero_codes:.1%} | {skipping:.2f} | {dense:.2f} | "
    "{speedup:.2f} [{low:.2f}, {high:.2f}] | {correct}",
    title="{model} {format}, {threads} threads, {isa}, read {read_gbps:.1f} GB/s",
    rounds=7,
)
@MODEL_DIR
@click.option("--plant", type=click.FloatRange(5, 95), help="per cent of zero gates")
@TEAM
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True)
@PAGES_READ
@MIB
def main(
    model_dir: Path | None,
    plant: float | None,
    threads: int,
    tokens: int,
    pages: str,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each layer, for the MLPs and for the step."""
    model = opened(model_dir)
    if plant is not None:
        model = planted(model, plant)
    reader = Reader(pages, mib << 20)
    context = min(model.spec.max_positions, tokens + 2 * _PROMPT)
    modes = {"skipping": None, "dense": DENSE}
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        steps: dict[str, list[float]] = {}
        runners = {}
        for mode, scope in modes.items():
            profiler = stack.enter_context(closing(Profiler(model, threads, context, scope)))
            runner = stack.enter_context(closing(Runner(model, threads, context, scope)))
            runs[f"{mode} mlp"] = lambda p=profiler: mlp_us(median_step(p.decode(tokens, _PROMPT)))
            runs[f"{mode} step"] = partial(runner.decode, tokens)
            runners[mode] = runner
        shares = zeros_by_layer(runners["skipping"].session, tokens)
        runs["read"] = partial(reader.gbps, threads)
        steps = turns(runs, rounds)
    same = len({ids for runner in runners.values() for ids in runner.ids}) == 1
    about: Row = {
        "op": "skip",
        "model": model.checkpoint.path.name,
        "format": model.precision,
        "planted": plant,
        "threads": threads,
        "isa": runners["dense"].session.isa,
        "read_gbps": median(steps["read"]),
    }
    for layer, (gates, codes) in enumerate(shares):
        yield {**about, "test": f"layer {layer}", "zero_gates": gates, "zero_codes": codes}
    mean = np.mean(shares, axis=0).tolist()
    about |= {"zero_gates": mean[0], "zero_codes": mean[1], "correct": same}
    for test, name in (("MLPs, us", "mlp"), (f"step, tg{tokens} tok/s", "step")):
        ours, theirs = steps[f"skipping {name}"], steps[f"dense {name}"]
        times = ratio(theirs, ours) if name == "mlp" else ratio(ours, theirs)
        yield {
            **about,
            "test": test,
            "skipping": median(ours),
            "dense": median(theirs),
            "samples": {"skipping": ours, "dense": theirs},
            "speedup": times.value,
            "low": times.low,
            "high": times.high,
        }


if __name__ == "__main__":
    main()
