"""The cases of the op table at the real sizes that it names, or unchanged without any."""

from dataclasses import replace
from fnmatch import fnmatchcase

from clocher_kernels.ops import OPS, OpSpec
from clocher_kernels.ops.contract import Case, Real
from clocher_kernels.ops.quantize import groups_of

_PAGE = 16  # cells of a page in every case
_KIND = {"aligned", "wide"}  # words of case ids about replaced sizes


def real_cases() -> list[tuple[OpSpec, Case]]:
    """Return every op with its cases at real sizes."""
    found = []
    for spec in OPS.values():
        cases = [
            resized(spec, case, real)
            for real in spec.real
            for case in spec.cases
            if fnmatchcase(case.id, real.cases)
        ]
        by_id = {case.id: case for case in (cases if spec.real else spec.cases)}
        found += [(spec, case) for case in by_id.values()]
    return found


def resized(spec: OpSpec, case: Case, real: Real) -> Case:
    """Return a case with other sizes, and the attributes that depend on them."""
    attrs, sizes = dict(case.attrs), dict(real.sizes)
    if "group" in attrs:
        sizes["B"] = groups_of(sizes[spec.param("x").letters[-1]], int(attrs["group"]))
    if "kv_dtype" in attrs:
        sizes |= {"F": sizes["N"] * sizes["D"], "T": _PAGE, "P": sizes["S"] * sizes["B"]}
        if "scale" in attrs:
            attrs["scale"] = sizes["D"] ** -0.5
    words = case.id.split("-") if real.label is None else [real.label]
    kept = [word for word in words if word and word not in _KIND and not _is_size(word, case)]
    spelled = [f"{letter.lower()}{size}" for letter, size in real.sizes.items()]
    return replace(case, id="-".join(kept + spelled), sizes=sizes, attrs=attrs)


def _is_size(word: str, case: Case) -> bool:
    return word[1:].isdigit() and case.sizes.get(word[0].upper()) == int(word[1:])
