"""Host-side sampling, for requests beyond the Plan's sampling op."""

from collections.abc import Sequence

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import sample, tokens_of
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import Sampling


def sample_on_host(
    logits: np.ndarray,
    ids: Sequence[int],
    prompt: int,
    made: int,
    sampling: Sampling,
    mask: np.ndarray | None = None,
) -> int:
    """Return a token drawn from logits, [V] fp32. Raises UsageError.

    Order: penalties (CTRL, OpenAI), biases, processors, `mask` [W] u32; then, unless greedy, min_p
    (Nguyen et al. 2024) and the sampling op's steps. Deterministic in seed, `made` and logits.
    """
    row = logits.astype(np.float32, copy=True)
    if sampling.repetition_penalty != 1:
        seen = np.unique(ids)
        strength = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / strength, row[seen] * strength)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = np.unique(ids[prompt:], return_counts=True)
        row[seen.astype(np.int64)] -= np.float32(sampling.presence_penalty) + np.float32(
            sampling.frequency_penalty
        ) * counts.astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        row[token] += np.float32(bias)
    for process in sampling.processors:
        row = _processed(process(list(ids), row), row.shape)
    if mask is not None:
        among = tokens_of(mask, row.size)
        forbidden = np.full_like(row, -np.inf)
        forbidden[among] = row[among]
        row = forbidden
    best = int(row.argmax())
    if not row[best] > -np.inf:
        raise UsageError(
            "biases or logits processors left no token that is allowed; leave at least one above "
            "-inf"
        )
    if sampling.temperature == 0:
        return best
    temperature = np.float64(sampling.temperature)
    least = row[best] + temperature * np.log(sampling.min_p) if sampling.min_p else -np.inf
    kept = np.flatnonzero((row >= least) & (row > -np.inf))
    out = np.zeros(1, np.int32)
    sample(
        logits=row[kept][None],
        allowed=np.zeros((1, 1), np.uint32),
        masked=np.zeros(1, np.int32),  # what is kept is allowed
        temperature=np.array([sampling.temperature], np.float32),
        top_k=np.array([sampling.top_k], np.int32),
        top_p=np.array([sampling.top_p], np.float32),
        seeds=np.array([sampling.seed], np.uint64),
        draws=np.array([made], np.int32),
        ids=out,
    )
    if out[0] < 0:
        raise UsageError("logits processors made infinite logits; only -inf is allowed")
    return int(kept[out[0]])


def _processed(row: object, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(row)
    if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
        raise UsageError(
            f"a logits processor returned {shown(row)}; expected an array of {shape[0]} numbers"
        )
    if np.isnan(array).any():
        raise UsageError("a logits processor returned NaN; expected numbers, or -inf to forbid")
    return array.astype(np.float32)
