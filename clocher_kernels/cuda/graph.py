"""The step sizes that are captured, and the CUDA graph of each."""

from collections.abc import Callable, Sequence

import torch

from clocher_kernels.cuda.launch import Launch, execute

DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = (16, 32, 64, 128, 256, 512)
CONTEXT_CELLS = (512, 2048, 8192, 32768)
_ROWS_AT_ONCE = 8


def bucket(value: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending sizes >= value, or the largest."""
    return next((size for size in sizes if size >= value), sizes[-1])


def token_buckets(tokens: int, rows: int) -> tuple[int, ...]:
    """Return the captured token counts, ascending; a step is padded with copies of its last token.

    Powers of two up to `rows` (batches) and from 16 on (prompt chunks), and the capacity.
    """
    sizes = {m for m in DECODE_TOKENS if m < rows} | {rows, tokens, *PROMPT_TOKENS}
    return tuple(sorted(m for m in sizes if m <= tokens))


def row_buckets(tokens: int, rows: int, most: int) -> tuple[int, ...]:
    """Return the output row counts that a step of `tokens` tokens is captured for, ascending.

    A decode step has about as many rows as tokens, drafts included; one with prompts a row per
    sequence. Up to eight rows the head reads its weight once. Only a full chunk (`most` tokens) can
    end without a row.
    """
    sizes = {min(tokens, rows, _ROWS_AT_ONCE), min(tokens, rows)}
    return tuple(sorted(sizes | {0} if tokens == most else sizes))


def context_buckets(cells: int) -> tuple[int, ...]:
    """Return the cache cell counts that steps are captured for, ascending."""
    return (*(c for c in CONTEXT_CELLS if c < cells), cells)


def capture(launches: Sequence[Launch], stream: "torch.cuda.Stream | None") -> Callable[[], None]:
    """Return a function that replays the launches of a step as one CUDA graph.

    They run once first, to load every kernel. Their tensors must stay alive. Without a stream (no
    GPU) they are executed one by one.
    """
    if stream is None:
        return lambda: execute(launches)
    with torch.cuda.stream(stream):
        execute(launches)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # GPU work of other threads of this process must not break the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            execute(launches)

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay
