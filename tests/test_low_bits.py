"""The study of two to five bits: what it rounds to is what `Tcq` holds, and loses less."""

import numpy as np

from bench.low_bits_rounding import Recipe, correct, nearest_levels, parse, prepare, quantise
from clocher_kernels.formats.tcq import DEVIATION, levels


def test_each_unit_is_a_sequence_of_the_trellis() -> None:
    """z0 = u[-2] and z1 = u ^ u[-1] ^ u[-3], the rows of a column after those of the one before."""
    w = np.random.default_rng(3).standard_normal((256, 32), dtype=np.float32)
    step, one = np.full_like(w, 1 / DEVIATION[3]), np.eye(32, dtype=np.float32)
    codes, errors = correct(w.copy(), step, one, levels(3), nearest_levels(3))
    for part in codes.reshape(-1, 16, 32):
        past = [0, 0, 0]
        for code in part.T.ravel().tolist():
            assert code & 1 == past[-2]
            past.append(code >> 1 & 1 ^ past[-1] ^ past[-3])
    np.testing.assert_allclose(errors, w - step * levels(3)[codes], atol=1e-6)
    # The best eight levels alone leave .0345 (Max 1960).
    assert (errors**2).mean() < 0.026


def test_correction_and_searched_scales_lose_less() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((600, 128)).cumsum(axis=1)
    hessian = (x.T @ x).astype(np.float32)
    w = rng.standard_t(5, (64, 128)).astype(np.float32)
    found = []
    for text in ("3 rms damp0", "3 rms", "3", "8"):
        recipe = parse(text)
        out, loss = quantise(w, prepare(hessian, recipe), recipe)
        np.testing.assert_allclose(loss.sum(), ((w - out) @ hessian * (w - out)).sum(), rtol=0.02)
        found.append(float(loss.sum()))
    assert found == sorted(found, reverse=True)


def test_a_recipe_is_bits_and_switches() -> None:
    assert parse("4 rms blind damp0.01 mix4.1") == Recipe(4, 0.01, True, True, 4.1)
