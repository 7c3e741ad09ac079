"""The study of two to five bits: its trellis can be stored, its rotation can be undone."""

import numpy as np

from bench.low_bits_rounding import correct, parse, rotation, subsets, turn


def test_a_column_of_the_trellis_is_one_bit_and_the_upper_bits_of_each_code() -> None:
    """z0 = rol(u, 2) and z1 = u ^ rol(u, 1) ^ rol(u, 3): the end of a sequence meets its start."""
    rng = np.random.default_rng(3)
    w = rng.standard_normal((128, 3), dtype=np.float32)
    levels, one = np.linspace(-2, 2, 16, dtype=np.float32), np.eye(3, dtype=np.float32)
    codes, errors = correct.py_func(w.copy(), np.ones_like(w), levels, one, subsets(3), 64)
    for part in codes.reshape(2, 64, 3).transpose(0, 2, 1).reshape(6, 64):
        u = np.roll(part & 1, -2)
        np.testing.assert_array_equal(part >> 1 & 1, u ^ np.roll(u, 1) ^ np.roll(u, 3))
    np.testing.assert_allclose(errors, w - levels[codes], atol=1e-6)
    # 16 levels at three bits a weight lose less than eight do, if the sequence is well chosen.
    eight = np.linspace(-2, 2, 8, dtype=np.float32)
    coarse = correct.py_func(w.copy(), np.ones_like(w), eight, one, subsets(0), 64)[1]
    assert (errors**2).mean() < 0.88 * (coarse**2).mean()


def test_a_rotation_is_undone_by_its_transpose() -> None:
    x = np.random.default_rng(4).standard_normal((5, 192), dtype=np.float32)
    blocks = rotation(192, 64)
    np.testing.assert_allclose(turn(turn(x, blocks), blocks.transpose(0, 2, 1)), x, atol=1e-5)


def test_a_recipe_is_bits_and_switches() -> None:
    found = parse("4 g32 s6 levels gptq rot64 tcq3 mix4.1")
    assert found[:7] == (4, 32, 6, True, True, 64, 3) and found.mix == 4.1
