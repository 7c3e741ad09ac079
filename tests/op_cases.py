"""Every case that back ends are compared with the references on."""

from bench.op_run import Arrays, OpRun, error, name_of
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

__all__ = ["ALL", "Arrays", "OpRun", "error", "name_of"]


def _large() -> list[tuple[OpSpec, Case]]:
    """Sizes that cross the blocks of kernels: 64 tokens, 8 rows, 512 columns; odd groups."""
    cases = []
    for fmt, k in (
        ("f32", 1100),
        ("bf16", 1041),
        ("int4_sym_g100_f16", 1100),
        ("int4_asym_g34_f32", 613),
        ("int8_g37_bf16", 600),
        ("int8_tensor_f32", 530),
        ("fp8_e4m3_b128_bf16", 1100),
        ("mxfp4", 1088),
        ("ternary", 1041),
    ):
        sizes = {"M": 70, "N": 148, "K": k}
        name = f"large-{fmt}-m70-n148-k{k}"
        cases.append((OPS["linear"], Case(name, sizes, {}, {"w": fmt}, {"bias": True})))
    for k in (64, 1041):
        sizes = {"M": 70, "N": 20, "K": k}
        case = Case(f"large-m70-n20-k{k}", sizes, {}, {"w": "ternary"}, {"residual": True})
        cases.append((OPS["linear_i8"], case))
    limits = {"limit": 7.0, "alpha": 1.702}
    for fmt in ("mxfp4", "bf16"):
        sizes = {"M": 70, "E": 3, "A": 2, "J": 22, "I": 11, "K": 544}
        case = Case(f"large-{fmt}-m70-e3-a2-i11-k544", sizes, limits, {"w": fmt}, {"bias": True})
        cases.append((OPS["moe_gate_up"], case))
        sizes = {"M": 70, "E": 3, "A": 2, "N": 11, "I": 544}
        case = Case(f"large-{fmt}-m70-e3-a2-n11-i544", sizes, {}, {"w": fmt}, {"bias": True})
        cases.append((OPS["moe_down"], case))
    sizes, options = {"M": 70, "N": 50, "K": 1300}, {"block": (20, 600), "density": 0.7}
    cases.append((OPS["bsr_linear"], Case("large-20x600-m70-n50-k1300", sizes, options=options)))
    return cases


ALL = [*((spec, case) for spec in OPS.values() for case in spec.cases), *_large()]
