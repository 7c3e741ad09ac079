"""What calibration keeps of a linear's inputs: moments, the Hessian, and rows held out."""

import numpy as np

from clocher_kernels.errors import ShapeError

HELD_ROWS = 512
"""Held-out inputs kept of one site or expert."""


class InputStats:
    """Statistics of the inputs x_t of a linear, weighted by p_t (the router's weight, else 1).

    Args:
        columns: K.
        hessian: whether to sum the Hessian, K^2 fp32.

    Attributes:
        tokens: inputs summed, held-out ones excluded.
        hessian_sum: sum of p^2 x x^T, [K, K] fp32, or None.
    """

    def __init__(self, columns: int, *, hessian: bool = False) -> None:
        self.tokens = 0
        self._first = np.zeros(columns)
        self._second = np.zeros(columns)
        self.hessian_sum = np.zeros((columns, columns), np.float32) if hessian else None
        self._held: list[np.ndarray] = []

    def add(self, x: np.ndarray, held: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Sum inputs.

        Args:
            x: [m, K] fp32.
            held: [m] bool, inputs that are only kept for judging.
            weights: [m] fp32, p.
        """
        if x.shape[1] != len(self._first) or held.shape != x.shape[:1]:
            raise ShapeError(
                f"inputs {list(x.shape)} and mask {list(held.shape)}; expected "
                f"[m, {len(self._first)}] and [m]"
            )
        if weights is not None:
            x = x * weights[:, None]
        fit = x if not held.any() else x[~held]
        kept = sum(len(rows) for rows in self._held)
        if kept < HELD_ROWS and len(fit) < len(x):
            self._held.append(x[held][: HELD_ROWS - kept])
        self.tokens += len(fit)
        self._first += fit.sum(axis=0, dtype=np.float64)
        self._second += np.einsum("ij,ij->j", fit, fit)
        if self.hessian_sum is not None and len(fit):
            self.hessian_sum += fit.T @ fit

    @property
    def importance(self) -> np.ndarray:
        """E[p^2 x^2] of each column, [K]; zeros without tokens."""
        return self._second / max(1, self.tokens)

    @property
    def mean(self) -> np.ndarray:
        """E[p x] of each column, [K]."""
        return self._first / max(1, self.tokens)

    @property
    def hessian(self) -> np.ndarray:
        """H = 2/n sum p^2 x x^T, [K, K]; zeros without tokens."""
        if self.hessian_sum is None:
            raise ShapeError("these statistics have no Hessian; ask for one when they are made")
        return self.hessian_sum * np.float32(2 / max(1, self.tokens))

    @property
    def held(self) -> np.ndarray:
        """Held-out inputs, times p, [at most HELD_ROWS, K]."""
        if not self._held:
            return np.zeros((0, len(self._first)), np.float32)
        return np.concatenate(self._held)
