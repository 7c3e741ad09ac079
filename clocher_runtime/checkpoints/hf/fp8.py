"""fp8 checkpoints (`quant_method: fp8`): DeepSeek's 128 x 128 blocks, and whole tensors or rows.

    X.weight            e4m3 [N, K]
    X.weight_scale_inv  float [ceil(N/128), ceil(K/128)] with weight_block_size [128, 128]; else one
                        scale ([] or [1]) or one per row ([N, 1] or [N])

The scale multiplies, despite its name; files for whole tensors also call it `X.weight_scale`.

Source: transformers integrations/finegrained_fp8.py.
"""

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Fp8
from clocher_kernels.formats.fp8 import BLOCK, Scope
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.hf.arrays import FLOATS, Source, StoredArray, Tensors, unknown
from clocher_runtime.disk.safetensors_file import DTYPES


def read_fp8(source: Source) -> Tensors:
    """Return the tensors of the e4m3 arrays `X.weight`.

    Raises:
        UnsupportedModel: the settings are not known here.
        FormatError: the arrays contradict the settings or each other.
    """
    block = source.settings.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise unknown("weight_block_size", block, (f"[{BLOCK}, {BLOCK}]", None))
    source.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    source.choice("scale_fmt", "float", ("float",))
    # transformers takes blocks for granted where the key is left out; others mean whole tensors.
    left_out = "weight_block_size" not in source.settings
    scopes: tuple[Scope, ...] = ("b128",) if block else ("tensor", "row")
    tensors: Tensors = {}
    for name in [name for name, stored in source.rest.items() if stored.dtype == "F8_E4M3"]:
        codes = source.rest.pop(name)
        other = f"{name}_scale"
        scales = source.claim(other if other in source.rest else f"{name}_scale_inv", codes)
        tensors[name] = fp8_tensor(codes, scales, ("b128", *scopes) if left_out else scopes)
    source.refuse_orphans(".weight_scale", ".weight_scale_inv")
    return tensors


def fp8_tensor(codes: StoredArray, scales: StoredArray, scopes: tuple[Scope, ...]) -> QuantTensor:
    """Return a tensor of e4m3 codes and their scales, as they lie in the file.

    Args:
        scopes: what the scales may be for; the first that their shape fits is taken.

    Raises:
        FormatError: a dtype or a shape is another one.
    """
    codes.expect(("F8_E4M3",))
    n, k = codes.matrix()
    scales.expect(FLOATS)
    shapes: dict[Scope, tuple[tuple[int, ...], ...]] = {
        "b128": ((-(-n // BLOCK), -(-k // BLOCK)),),
        "tensor": ((1,), (), (1, 1)),
        "row": ((n,), (n, 1)),
    }
    for scope in scopes:
        if scales.array.shape in shapes[scope]:
            fmt = Fp8("e4m3", scope, DTYPES[scales.dtype])
            planes = {"codes": codes.array, "scales": scales.array.reshape(shapes[scope][0])}
            return stored_tensor((n, k), fmt, planes, codes.where)
    expected = " or ".join(str(list(shape)) for scope in scopes for shape in shapes[scope])
    raise FormatError(f"{scales.where}: shape {list(scales.array.shape)}, expected {expected}")
