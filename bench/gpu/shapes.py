"""The shapes that are checked and timed: those of published models, and tiny ones for a dry run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K] of a model and the formats it is tried in."""

    model: str
    layer: str
    n: int
    k: int
    formats: tuple[str, ...]
    tokens: tuple[int, ...] = (1,)


def formats_at(matrix: Matrix, m: int) -> tuple[str, ...]:
    """Return the formats that a number of tokens is tried in: past a batch of 8 a few of them."""
    few = [name for name in matrix.formats if m <= _BATCH or name in _MANY_TOKENS]
    return tuple(few)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: E experts, A active, hidden size K, inner size I."""

    model: str
    experts: int
    active: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """Attention of a model: N query heads over H of D values."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    sinks: bool
    windows: tuple[int, ...]


_INT4, _INT8 = "int4_sym_g128_f16", "int8_row_f32"
_FP8, _ASYM = "fp8_e4m3_row_f32", "int4_asym_g64_f16"
_SMALL_GROUP = "int4_sym_g64_f16"
_MOST = (_INT4, _ASYM, "mxfp4", _INT8, _FP8, "bf16")
_OSS = (_SMALL_GROUP, "mxfp4", _INT8, _FP8, "bf16")

_BATCH, _MANY_TOKENS = 8, (_INT4, _INT8, "bf16")

# 9 to 64 tokens are large batches, 128 and 512 chunks of a prompt.
_BATCHES = (1, 2, 4, 8, 9, 16, 32, 64, 128, 512)
MATRICES = (
    Matrix("llama-8b", "q, o", 4096, 4096, (*_MOST, "f16"), _BATCHES),
    Matrix("llama-8b", "down", 4096, 14336, _MOST, (1, 4, 8)),
    Matrix("llama-8b", "gate, up", 14336, 4096, _MOST, (1, 16, 64, 128)),
    Matrix("llama-8b", "k, v", 1024, 4096, (_INT4, _INT8)),
    Matrix("llama-8b", "head", 128256, 4096, (_INT4, _INT8, "bf16")),
    Matrix("none", "square", 8192, 8192, (_INT4, "mxfp4", _INT8, _FP8, "bf16")),
    Matrix("gpt-oss-20b", "o", 2880, 4096, _OSS),
    Matrix("gpt-oss-20b", "q", 4096, 2880, _OSS),
    Matrix("gpt-oss-20b", "k, v", 512, 2880, ("bf16",)),
    Matrix("gpt-oss-20b", "head", 201088, 2880, (_SMALL_GROUP, _INT8, _FP8, "bf16")),
    Matrix("bitnet-2b", "q, o", 2560, 2560, ("ternary",), (1, 8)),
    Matrix("bitnet-2b", "gate, up", 6912, 2560, ("ternary",)),
    Matrix("bitnet-2b", "down", 2560, 6912, ("ternary",)),
    Matrix("bitnet-2b", "head", 128256, 2560, ("bf16",)),
    Matrix("llama-1b", "q, o", 2048, 2048, (_INT4, _INT8)),
    Matrix("llama-1b", "gate, up", 8192, 2048, (_INT4, _INT8)),
    Matrix("llama-1b", "down", 2048, 8192, (_INT4, _INT8)),
)
TINY_MATRICES = (
    Matrix("tiny", "linear", 12, 128, ("int4_sym_g64_f16", "int8_row_f32", "bf16"), (1, 2)),
    Matrix("tiny", "ternary", 8, 64, ("ternary",)),
)

EXPERTS = (Experts("gpt-oss-20b", 32, 4, 2880, 2880, (1, 2, 4, 8)),)
TINY_EXPERTS = (Experts("tiny", 4, 2, 64, 32, (1,)),)

HEADS = (
    Heads("gpt-oss-20b", 64, 8, 64, True, (0, 128)),
    Heads("llama-8b", 32, 8, 128, False, (0,)),
)
TINY_HEADS = (Heads("tiny", 4, 2, 16, True, (0,)),)
CONTEXTS, TINY_CONTEXTS = (1024, 8192, 32768), (70,)
KV_DTYPES, TINY_KV_DTYPES = ("bf16", "e4m3", "i8"), ("bf16", "i8")

SPARSE = ((4096, 4096), (4096, 14336))
TINY_SPARSE = ((32, 64),)
BLOCKS, TINY_BLOCKS = (32, 64, 128), (16,)
DENSITIES, TINY_DENSITIES = (1.0, 0.8, 0.7, 0.5, 0.3, 0.1), (0.5,)


def matrices(dry: bool) -> tuple[Matrix, ...]:
    """Return the weights to check and to time."""
    return TINY_MATRICES if dry else MATRICES


def experts(dry: bool) -> tuple[Experts, ...]:
    """Return the mixtures of experts to check and to time."""
    return TINY_EXPERTS if dry else EXPERTS


def heads(dry: bool) -> tuple[Heads, ...]:
    """Return the attention shapes to check and to time."""
    return TINY_HEADS if dry else HEADS
