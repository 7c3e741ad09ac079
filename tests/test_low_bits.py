"""The study of two to five bits: recipes, and that correction and bits lose less."""

import numpy as np

from bench.low_bits import Recipe, parse, quantise


def test_correction_and_more_bits_lose_less() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((600, 128)).cumsum(axis=1)
    hessian = (x.T @ x).astype(np.float32)
    w = rng.standard_t(5, (64, 128)).astype(np.float32)
    found = []
    for text in ("3 damp0", "3", "4", "8"):
        recipe = parse(text)
        out, loss = quantise(w, hessian, recipe, 1)
        np.testing.assert_allclose(loss.sum(), ((w - out) @ hessian * (w - out)).sum(), rtol=0.02)
        found.append(float(loss.sum()))
    assert found == sorted(found, reverse=True)


def test_a_recipe_is_bits_and_switches() -> None:
    assert parse("4 blind damp0.01 mix4.1") == Recipe(4, 0.01, True, 4.1)
