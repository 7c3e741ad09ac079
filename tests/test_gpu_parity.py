"""`pytest -m gpu`: every op on every case of its contract, on the GPU.

Each case is launched with every storage of activations that it has, as the suite's part `parity`
does it (a second run, the replay of a graph, tokens alone), and executed as a Plan by the CUDA
executor. Without a GPU every case is skipped, and says why.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_cases import run_interpreted
from op_cases import ALL

from bench.gpu import parity
from bench.gpu.setting import Setting, make_setting
from bench.ops import OpRun, judge
from clocher_kernels.cuda import bricks
from clocher_kernels.cuda.executor import LOWER, CudaExecutor
from clocher_kernels.cuda.launch import INTERPRETER, Device
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.contract import Case, OpSpec

CASES = [
    pytest.param(
        spec,
        case,
        id=f"{spec.name}-{case.id}",
        marks=pytest.mark.skipif("cuda" in case.missing, reason=case.missing.get("cuda", "")),
    )
    for spec in OPS.values()
    for case in spec.cases
]


@pytest.fixture(scope="session")
def gpu() -> Setting:
    return make_setting(dry=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_parity(spec: OpSpec, case: Case, gpu: Setting) -> None:
    gpu.random.manual_seed(1)
    for act in parity.activations(spec, case):
        try:
            row = parity.Trial(gpu, spec, case, act).check()
        except (UnsupportedOp, ShapeError):
            assert act != "f32", "the executor has nothing else to fall back to"
            continue
        assert row["status"] == "ok", (act, row)
    executed(spec, case, gpu.device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(OPS[op], case, id=f"{op}-{case.id}")
        for op, rows in (("linear", "N"), ("embed", "V"))
        for case in OPS[op].cases
        if "bf16" in case.formats.values() and case.sizes[rows] % 8 + case.sizes["K"] % 64 == 0
    ],
)
def test_parity_of_heads_in_bricks(
    spec: OpSpec, case: Case, gpu: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bricks, "LEAST_FLOAT_ROWS", 8)
    test_parity(spec, case, gpu)


_KINDS = ("bf16", "int4_sym_g128_f16", "int4_asym_g64_f16", "int8_row_f32", "mxfp4", "q4_k", "tcq3")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "least"), [*((fmt, bricks.LEAST_FLOAT_ROWS) for fmt in _KINDS), ("bf16", 8)]
)
def test_32_tokens_have_the_bits_of_one(
    fmt: str, least: int, gpu: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a least of 8 rows bf16 lies in bricks, as heads do."""
    monkeypatch.setattr(bricks, "LEAST_FLOAT_ROWS", least)
    case = Case(f"{fmt}-m32", {"M": 32, "N": 64, "K": 1024}, formats={"w": fmt})
    gpu.random.manual_seed(1)
    row = parity.Trial(gpu, OPS["linear"], case, "f16").check()
    assert row["status"] == "ok" and row["alone"], row


MISSING = {
    (s.name, c.formats.get("w")): (s, c) for s, c in ALL if "cuda" in c.missing and s.name in LOWER
}


@pytest.mark.parametrize(("spec", "case"), list(MISSING.values()), ids=map(str, MISSING))
def test_what_is_said_to_have_no_kernel_is_refused(spec: OpSpec, case: Case) -> None:
    blocks = "no CUDA kernel reads ggml's blocks .* clocher quantize|linear: no CUDA kernel adds"
    with pytest.raises(UnsupportedOp, match=f"^{spec.name}: no CUDA kernel .* 16-bit$|^{blocks}"):
        run_interpreted(OpRun(spec, case))


@pytest.mark.parametrize(
    "op", ["gather_rows", "rms_norm", "quantize", "kv_append", "page_bounds", "select_pages"]
)
def test_a_case_through_the_executor_in_the_interpreter(op: str) -> None:
    executed(OPS[op], OPS[op].cases[0], INTERPRETER)


def test_a_wrong_result_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LOWER["rms_norm"]
    other = lambda **arguments: right(**{**arguments, "eps": 1.0})  # noqa: E731
    monkeypatch.setitem(LOWER, "rms_norm", other)
    with pytest.raises(AssertionError, match="rms"):
        executed(OPS["rms_norm"], OPS["rms_norm"].cases[3], INTERPRETER)


def executed(spec: OpSpec, case: Case, device: Device) -> None:
    """Execute a case's Plan on a device and compare what it writes with the reference."""
    run = OpRun(spec, case)
    expected = run.run(ReferenceExecutor)
    # A step has at least as many tokens as output rows; the Plan of one op may have only rows.
    plan = replace(run.plan, tokens=max(run.plan.tokens, run.plan.rows))
    executor = CudaExecutor(plan, run.weights, activations="f32", device=device)
    try:
        executor.warm()  # launches run before they are captured: what they add to is set afterwards
        executor.synchronize()  # and this stream does not wait for what they still restore
        for name, buffer in plan.buffers.items():
            if buffer.role == "input":
                executor.array(name)[...] = run.values[name]
            elif buffer.role == "state":
                executor._values[name].copy_(tensor_like(executor._values[name], run.values[name]))
            else:
                parity.poison(executor._values[name])
        if device.torch_device == "cuda":
            torch.cuda.synchronize()  # the executor's stream does not wait for this one
        executor.upload()
        executor.step(plan.tokens, plan.rows)
        executor.synchronize()
        for name in run.written:
            want = expected[name]
            got = executor._values[name].cpu().contiguous()
            wide = got.view(torch.int16) if got.element_size() == 2 else got
            found = wide.numpy().view(want.dtype)
            row = judge(spec.allowed(case, "cuda"), {name: (found, want)})
            assert row["status"] == "ok", (name, row)
    finally:
        executor.close()


def tensor_like(tensor: torch.Tensor, value: np.ndarray) -> torch.Tensor:
    """Return stored values as a tensor of the same type."""
    stored = value.view(np.int16) if value.itemsize == 2 else value
    return torch.from_numpy(stored.copy()).view(tensor.dtype)
