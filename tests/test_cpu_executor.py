"""Binding a Plan: what is refused, what is not copied, what a step costs."""

import time
from dataclasses import replace

import numpy as np
import pytest

from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from cpu_fallback.executor import LOWER, CpuExecutor

RNG = np.random.default_rng(17)
M, R, N, K = 3, 2, 12, 40


def _weight(n: int = N, k: int = K, fmt: str = "bf16") -> QuantTensor:
    return encode(RNG.standard_normal((n, k), dtype=np.float32), parse_format(fmt))


def _plan(*calls: Call, **buffers: Buffer) -> Plan:
    known = {
        "x": Buffer((M, K), "f32", "M", "input"),
        "y": Buffer((M, N), "f32", "M", "output"),
        "z": Buffer((R, N), "f32", "R", "output"),
        "rows": Buffer((R,), "i32", "R", "input"),
    }
    return Plan(M, R, {**known, **buffers}, {}, ("w",), calls)


LINEAR = Call("linear", {"x": "x", "w": "w", "y": "y"})


def test_every_op_has_a_kernel() -> None:
    assert set(LOWER) == set(OPS)


def test_rows_that_follow_tokens_and_rows_that_follow_outputs() -> None:
    gather = Call("gather_rows", {"x": "y", "rows": "rows", "y": "z"})
    back = Call("linear", {"x": "z", "w": "v", "y": "u"})
    plan = replace(
        _plan(LINEAR, gather, back, u=Buffer((R, K), "f32", "R", "output")), weights=("w", "v")
    )
    weights = {"w": _weight(), "v": _weight(K, N)}
    x = RNG.standard_normal((M, K), dtype=np.float32)
    outputs = []
    for executor in (ReferenceExecutor(plan, weights), CpuExecutor(plan, weights, 2)):
        executor.array("x")[...] = x
        executor.array("rows")[...] = [1, 0]
        executor.step(2, 1)
        outputs.append(executor.array("u").copy())
        executor.close()
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert outputs[1][0].any() and not outputs[1][1].any()


def test_weights_are_used_where_they_lie() -> None:
    weight = _weight()
    executor = CpuExecutor(_plan(LINEAR), {"w": weight}, 1)
    executor.array("x")[...] = 1
    executor.step(1, 0)
    before = executor.array("y")[0].copy()
    weight.planes["data"][...] = 0
    executor.step(1, 0)
    assert before.any() and not executor.array("y")[0].any()
    assert executor.array("y").ctypes.data % 64 == 0
    executor.close()


def test_an_empty_step_is_allowed_and_writes_nothing() -> None:
    executor = CpuExecutor(_plan(LINEAR), {"w": _weight()}, 2)
    executor.array("y")[...] = 7
    executor.step(0, 0)
    assert (executor.array("y") == 7).all()
    with pytest.raises(ShapeError, match="4 tokens and 0 rows; the Plan has room for 3 and 2"):
        executor.step(4, 0)
    executor.close()


def test_progress_is_not_called_when_nothing_is_compiled() -> None:
    CpuExecutor(_plan(LINEAR), {"w": _weight()}, 1).close()
    calls: list[tuple[int, int]] = []
    CpuExecutor(_plan(LINEAR), {"w": _weight()}, 1, lambda *at: calls.append(at)).close()
    assert calls == []


@pytest.mark.parametrize(
    ("call", "buffers", "weight", "message"),
    [
        (Call("linear", {"x": "x", "y": "y"}), {}, None, "no argument for 'w'"),
        (LINEAR, {}, _weight(N, K + 1), "K is 40 elsewhere"),
        (LINEAR, {"y": Buffer((M, N), "i32", "M")}, None, "is int32; expected float32"),
        (LINEAR, {"y": Buffer((M, N, 1), "f32", "M")}, None, r"expected \[M N\]"),
        (LINEAR, {"y": Buffer((M, N), "f32")}, None, "M follows nothing in this buffer"),
        (LINEAR, {}, RNG.standard_normal((N, K)), "is a ndarray; a matrix is wanted"),
    ],
)
def test_what_does_not_fit_is_refused(
    call: Call, buffers: dict[str, Buffer], weight: object, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        CpuExecutor(_plan(call, **buffers), {"w": _weight() if weight is None else weight}, 1)


def test_a_strided_weight_is_refused() -> None:
    whole = _weight(N, 2 * K, "f32")
    half = QuantTensor((N, K), whole.format, {"data": whole.planes["data"][:, ::2]})
    with pytest.raises(ShapeError, match="not contiguous"):
        CpuExecutor(_plan(LINEAR), {"w": half}, 1)


def test_a_format_without_kernel_is_refused() -> None:
    values = RNG.standard_normal((N, K), dtype=np.float32)
    sparse = encode(values, Bsr.for_values(values, (4, 4)))
    with pytest.raises(UnsupportedOp, match=r"linear: no CPU kernel reads .* for f32, bf16"):
        CpuExecutor(_plan(LINEAR), {"w": sparse}, 1)
    call = Call("bsr_linear", {"x": "x", "w": "w", "y": "y"})
    with pytest.raises(UnsupportedOp, match=r"bsr_linear: .* is bf16; expected block-sparse"):
        CpuExecutor(_plan(call), {"w": _weight()}, 1)


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match=r"no kernel for 'fold'; it has .*linear"):
        CpuExecutor(_plan(Call("fold", {})), {"w": _weight()}, 1)


def test_a_step_costs_microseconds_of_python() -> None:
    executor = CpuExecutor(_plan(), {"w": _weight()}, 1)
    with executor.running():
        best = min(_seconds(executor) for _ in range(20))
    executor.close()
    assert best < 5e-6


def _seconds(executor: CpuExecutor, steps: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        executor.step(1, 1)
    return (time.perf_counter() - start) / steps
