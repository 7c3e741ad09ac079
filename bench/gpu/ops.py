"""The op table at real models' sizes with a cold cache; linear beside its peers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.gpu import peers
from bench.gpu.parity import Trial
from bench.gpu.setting import Call, Item, Row, Setting
from bench.ops.shapes import real_cases
from clocher_kernels.cuda.launch import execute
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import cost
from clocher_kernels.ops.contract import Case, OpSpec

_DRY = ("rms_norm", "gather_rows")
_SHAPES, _DRY_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096)), ((64, 128),)
_TOKENS = (1, 4, 8)
_OURS = ("int4_sym_g128_f16", "int4_asym_g64_f16", "mxfp4", "int8_row_f32", "fp8_e4m3_row_f32")


def items(dry: bool) -> list[Item]:
    """Return one item for each op at each of its real sizes."""
    cases = [(OPS[op], OPS[op].cases[0]) for op in _DRY] if dry else real_cases()
    cases = [(spec, case) for spec, case in cases if "cuda" not in case.missing]
    return [(f"{s.name}-{c.id}", partial(_time, spec=s, case=c)) for s, c in cases]


def peer_items(dry: bool) -> list[Item]:
    """Return one race of all formats and peers for each shape and number of tokens."""
    return [
        (f"{n}x{k}-m{m}", partial(_race, n=n, k=k, m=m))
        for n, k in (_DRY_SHAPES if dry else _SHAPES)
        for m in _TOKENS[: 1 if dry else None]
    ]


def _time(setting: Setting, spec: OpSpec, case: Case) -> list[Row]:
    setting.measure_bandwidth()
    prepare = partial(_contender, setting, spec, case)
    return setting.race({"clocher": prepare}, op=spec.name, case=case.id)


def _race(setting: Setting, n: int, k: int, m: int) -> list[Row]:
    setting.measure_bandwidth()
    racing = {name: peers.contender(setting, name, n, k, m) for name in peers.PEERS}
    linear = OPS["linear"]
    for name in _OURS[: 2 if setting.dry else None]:
        case = Case(f"{name}-{n}x{k}", {"M": m, "N": n, "K": k}, {}, {"w": name})
        racing[f"clocher {name}"] = partial(_contender, setting, linear, case)
    return setting.race(racing, n=n, k=k, m=m)


def _contender(setting: Setting, spec: OpSpec, case: Case) -> tuple[int, Sequence[Call]]:
    """Return the bytes of an op's call, and calls on copies of its arguments."""
    trial = Trial(setting, spec, case, "f16" if spec.narrow else "f32")
    outputs = {n: trial.plan.buffers[n].allocate() for n in trial.written}
    nbytes = cost(spec, {**outputs, **trial.values}, case.attrs).bytes
    first = trial.tensors()
    copies = [{n: _clone(v) for n, v in first.items()} for _ in range(setting.copies(nbytes))]
    setting.timer.synchronize()  # kernels that start early prefetch weights
    return nbytes, [partial(execute, trial.launches(tensors)) for tensors in copies]


def _clone(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return replace(value, planes={name: p.clone() for name, p in value.planes.items()})
    return value.clone()
