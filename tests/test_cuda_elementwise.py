"""The element-wise CUDA kernels in Triton's interpreter, against the NumPy references."""

import numpy as np
import pytest
import sass_ratchet
import torch
from cuda_cases import aot_report, run_interpreted
from op_cases import OpRun, error

from clocher_kernels.cuda import bricks
from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import INTERPRETER, execute
from clocher_kernels.cuda.prepack import prepack
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.contract import Case
from clocher_kernels.quant_tensor import encode


@pytest.mark.parametrize(
    "fmt",
    [
        "int4_asym_g34_f32",
        "int4_sym_row_f16",
        "int8_tensor_f32",
        "int8_g37_bf16",
        "fp8_e4m3_b128_bf16",
        "fp8_e5m2_row_f32",
    ],
)
def test_embed_of_every_kind_of_table(fmt: str) -> None:
    case = Case(f"{fmt}-m3-k301", {"M": 3, "V": 140, "K": 301}, formats={"table": fmt})
    op = OpRun(OPS["embed"], case)
    got, expected = run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"]
    rms, largest = error(got, expected)
    assert rms <= 2e-6 and largest <= 2e-5, (rms, largest)


def test_embed_names_the_formats_that_it_has() -> None:
    values = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    table = prepack(encode(values, parse_format("mxfp4")), INTERPRETER)
    ids, y = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 64)
    with pytest.raises(UnsupportedOp, match=r"mxfp4.*int8, fp8, int4, tcq and ggml"):
        LOWER["embed"](ids=ids, table=table, y=y, device=INTERPRETER)


@pytest.mark.parametrize(
    "fmt",
    ["int4_sym_g128_f16", "int4_asym_g128_f32", "int4_asym_g256_bf16", "int4_asym_row_f16", "bf16"],
)
def test_embed_reads_bricks(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bricks, "LEAST_FLOAT_ROWS", 24)
    case = Case(f"{fmt}-m5-k768", {"M": 5, "V": 24, "K": 768}, formats={"table": fmt})
    op = OpRun(OPS["embed"], case)
    op.values["ids"][:] = [23, 0, 9, 8, 7]
    got, expected = run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("op", "sizes", "attrs", "narrow"),
    [
        ("rms_norm", {"M": 2, "F": 2880, "D": 2880}, {"eps": 1e-5}, ("x", "y")),
        ("rope", {"M": 2, "F": 1152, "P": 32, "C": 9}, {}, ("x",)),
        ("gather_rows", {"M": 4, "R": 2, "K": 1100}, {}, ("y",)),
        ("hadamard", {"M": 2, "K": 1600}, {"size": 64}, ("x", "y")),
    ],
    ids=["rms_norm", "rope", "gather_rows", "hadamard"],
)
def test_narrow_activations(
    op: str,
    sizes: dict[str, int],
    attrs: dict[str, float],
    narrow: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    run = OpRun(OPS[op], Case("narrow", sizes, attrs))
    for name in narrow:
        if name in run.values:
            values = torch.from_numpy(run.values[name])
            run.values[name][...] = values.to(dtype).float().numpy()
    got = run_interpreted(run, dict.fromkeys(narrow, dtype))
    for name, expected in run.run(ReferenceExecutor).items():
        rms, _ = error(got[name], expected)
        # The interpreter truncates where a GPU rounds to bf16.
        assert rms <= (1e-3 if dtype == torch.float16 else 1e-2), (name, rms)


def test_rows_of_a_wider_buffer() -> None:
    """Queries and keys may be columns of one product; what is beside them must stay."""
    rng = np.random.default_rng(3)
    wide = torch.from_numpy(rng.standard_normal((3, 200), dtype=np.float32))
    kept = wide.clone()
    x, y = wide[:, 40:104], torch.full((3, 200), float("nan"))
    weight = torch.from_numpy(rng.standard_normal(32, dtype=np.float32))
    execute(LOWER["rms_norm"](x=x, weight=weight, y=y[:, 8:72], eps=1e-6, device=INTERPRETER))
    expected = np.empty((3, 64), np.float32)
    OPS["rms_norm"].reference(x=x.numpy(), weight=weight.numpy(), y=expected, eps=1e-6)
    np.testing.assert_allclose(y[:, 8:72].numpy(), expected, rtol=2e-5, atol=1e-6)
    assert y[:, :8].isnan().all() and y[:, 72:].isnan().all()

    tables = [torch.from_numpy(rng.standard_normal((5, 16), dtype=np.float32)) for _ in "cs"]
    positions = torch.tensor([4, 0, 2], dtype=torch.int32)
    cos, sin = tables
    execute(LOWER["rope"](x=x, positions=positions, cos=cos, sin=sin, device=INTERPRETER))
    rotated = kept[:, 40:104].numpy().copy()
    OPS["rope"].reference(x=rotated, positions=positions.numpy(), cos=cos.numpy(), sin=sin.numpy())
    np.testing.assert_allclose(x.numpy(), rotated, rtol=2e-5, atol=1e-6)
    assert torch.equal(wide[:, :40], kept[:, :40]) and torch.equal(wide[:, 104:], kept[:, 104:])


def test_joined_and_resized_rows_of_a_wider_buffer() -> None:
    rng = np.random.default_rng(4)
    wide = torch.from_numpy(rng.standard_normal((3, 200), dtype=np.float32))
    first, second, y = wide[:, 4:20], wide[:, 40:104], torch.full((3, 200), float("nan"))
    parts = {"first": first, "second": second}
    execute(LOWER["join_heads"](**parts, y=y[:, 8:136], heads=4, device=INTERPRETER))
    expected = np.empty((3, 128), np.float32)
    arrays = {name: part.numpy() for name, part in parts.items()}
    OPS["join_heads"].reference(**arrays, y=expected, heads=4)
    np.testing.assert_array_equal(y[:, 8:136].numpy(), expected)
    assert y[:, :8].isnan().all() and y[:, 136:].isnan().all()

    y.fill_(float("nan"))
    execute(LOWER["join_heads"](first=second, y=y[:, 8:104], heads=4, device=INTERPRETER))
    expected = np.empty((3, 96), np.float32)
    OPS["join_heads"].reference(first=second.numpy(), y=expected, heads=4)
    np.testing.assert_array_equal(y[:, 8:104].numpy(), expected)
    assert y[:, :8].isnan().all() and y[:, 104:].isnan().all()


def test_a_kernel_of_each_family_compiles() -> None:
    report = aot_report("cuda_aot_small.py")
    assert set(report) == {"int4_sym_g128_f16", "int8_row_f32", "ternary", "attention", "sample"}
    for name, used in report.items():
        assert used["local"] == 0, name
        assert used["loads"] > 0 or name in ("attention", "sample"), name


@pytest.mark.slow
def test_machine_code_does_not_spill() -> None:
    for name, used in aot_report("cuda_aot_elementwise.py").items():
        assert used["local"] <= sass_ratchet.LOCAL.get((sass_ratchet.VERSION, name), 0), name
