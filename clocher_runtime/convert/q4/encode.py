"""Encoding a tensor as a quantisation manifest says."""

from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.convert.q4.map import Q4Map
from clocher_runtime.convert.q4.parts import check_hashes, read_part
from clocher_runtime.convert.rounding import round_tensor


def encode_tensor(q4_map: Q4Map, name: str, tensor: QuantTensor, threads: int = 1) -> QuantTensor:
    """Return a tensor that `Q4Map.choose` has chosen, quantised.

    Its planes come from the manifest's parts if they are there, else they are rounded, some rows
    at a time. Where the manifest records their hashes, they are checked.

    Args:
        q4_map: the manifest.
        name: of the tensor.
        tensor: as the checkpoint stores it, [N, K] or [E, N, K].
        threads: how many threads round.

    Raises:
        FormatError: a value cannot be stored, or the planes are not those that the manifest
            records: the checkpoint is not the one that it was made from.
        ModelNotFound: a part is missing.
    """
    if q4_map.entries is None:
        rule = next(rule for rule in q4_map.rules if rule.pattern.matches(name))
        assert rule.format is not None, "a kept tensor is not chosen"
        return round_tensor(tensor, rule.format, rule.clip, threads)
    entry = q4_map.entries[name]
    if entry.part:
        return read_part(q4_map.parts_dir, q4_map.parts, name, entry)
    encoded = round_tensor(tensor, entry.format, q4_map.rules[entry.rule].clip, threads)
    check_hashes(encoded, entry, str(q4_map.path))
    return encoded
