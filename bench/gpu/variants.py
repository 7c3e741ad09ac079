"""The same launches in other ways: without early launches, with more stages of loads in flight."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bench.gpu import decode
from bench.gpu.ceilings import measure_copy
from bench.gpu.ours import product
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.timer import Call
from bench.gpu.weights import random_copies
from clocher_kernels.cuda.launch import Device, Launch, options
from clocher_kernels.formats import parse_format

_STAGES = (2, 3, 4)
_WEIGHTS = (
    ("int4_sym_g128_f16", 4096, 4096, 1),
    ("int4_sym_g128_f16", 4096, 4096, 16),
    ("mxfp4", 5760, 2880, 1),
    ("bf16", 4096, 2880, 1),
    ("int4_sym_g128_f16", 4096, 4096, 128),
)
_TINY = (("int4_sym_g64_f16", 12, 128, 1),)


class _Plain(Device):
    """A device whose kernels wait until their predecessor has ended."""

    __slots__ = ()

    @property
    def pdl(self) -> bool:
        return False


def without_pdl(setting: Setting) -> Setting:
    """Return a setting whose launches are not programmatic."""
    d = setting.device
    return replace(setting, device=_Plain(d.torch_device, d.capability, d.sms))


def items(dry: bool) -> list[Item]:
    """Return one item for each weight, and one for the steps of a whole model."""
    weights = [
        Item(f"{name}-{n}x{k}-m{m}", partial(_race, name=name, n=n, k=k, m=m))
        for name, n, k, m in (_TINY if dry else _WEIGHTS)
    ]
    model = (decode.TINY if dry else decode.PRECISIONS)[0]
    return [*weights, Item("steps-without-pdl", partial(_steps, model=model))]


def _race(setting: Setting, name: str, n: int, k: int, m: int) -> list[Row]:
    if not setting.copy_gbs:
        measure_copy(setting)
    fmt = parse_format(name)
    copies = random_copies(fmt, (n, k), setting)
    made = [product(setting, fmt, w, m, "f16").launches for w in copies]
    plain = [product(without_pdl(setting), fmt, w, m, "f16").launches for w in copies]
    calls: dict[str, list[Call]] = {
        "clocher": [partial(_execute, launches) for launches in made],
        "clocher without PDL": [partial(_execute, launches) for launches in plain],
    }
    for stages in _STAGES:
        calls[f"stages {stages}"] = [partial(_execute, launches, stages) for launches in made]
    facts: Row = {"kind": "variant", "weight": name, "n": n, "k": k, "m": m}
    nbytes = fmt.nbytes((n, k)) + 2 * m * (n + k)
    return [
        setting.measured(timing, nbytes, **facts, who=who)
        for who, timing in setting.timer.race(calls).items()
    ]


def _execute(launches: Sequence[Launch], stages: int = 0) -> None:
    for launch in launches:
        chosen = options(launch) | ({"num_stages": stages} if stages else {})
        launch.kernel[launch.grid](**launch.args, **launch.constants, **chosen)


def _steps(setting: Setting, model: decode.Precision) -> list[Row]:
    """Time the steps of a model without early launches; with them `decode` does."""
    model = replace(model, label=f"{model.label} without PDL", contexts=model.contexts[:2])
    return decode.measure(without_pdl(setting), model, 1)
