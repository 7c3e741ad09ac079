"""A process that follows: it has a part of a model, and executes it when the leader does.

`tensor_parallel` starts it. The first line that it reads says what to load; it answers with a line,
reads where to find the others, and then one command after the other until nothing more comes.
"""

import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from clocher_kernels.errors import ClocherError, ModelChanged
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.backends import Executor, ranks_of
from clocher_runtime.engine.binding import bind
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.tensor_parallel import (
    ASLEEP,
    AWAKE,
    HEADER,
    STEP,
    WALK,
    WARM,
    Answer,
    Job,
    files_of,
    inputs_of,
)


def load(job: Job) -> tuple[Executor, Any]:
    """Load a part of a model; return what executes it, and the ranks, not connected yet.

    Raises:
        ClocherError: see `load_model` and `bind`.
    """
    from clocher_runtime.engine.process_group import take_device

    take_device(job.backend, job.rank)
    model = load_model(open_checkpoint(Path(job.path)), job.precision)
    if files_of(model) != list(map(tuple, job.files)):
        raise ModelChanged(
            f"{job.path} is {files_of(model)} here, and {job.files} for the first rank; with "
            "tensor_parallel a model is named by its directory, without files beside it"
        )
    ranks = ranks_of(job.backend, job.rank, job.count)
    bound = bind(
        model,
        job.sizes,
        backend=job.backend,
        threads=job.threads,
        act_prec=job.act_prec,
        tuning=job.tuning,
        pretranspose=job.pretranspose,
        prefix_cache=False,
        progress=None,
        packing=None,
        ranks=ranks,
    )
    return bound.executor, ranks


def follow(executor: Executor, commands: BinaryIO) -> None:
    """Do what the leader does, until nothing more comes."""
    with ExitStack() as awake:
        while len(header := commands.read(8 * HEADER)) == 8 * HEADER:
            what, tokens, rows, masks, nbytes = np.frombuffer(header, np.int64).tolist()
            if nbytes:
                _fill(executor, commands.read(nbytes), tokens, rows, masks)
            if what == STEP:
                executor.step(tokens, rows)
            elif what == WALK:
                for _ in executor.walk(tokens, rows):
                    pass
            elif what == WARM:
                executor.warm()
            elif what == AWAKE:
                awake.enter_context(executor.running())
            elif what == ASLEEP:
                awake.close()


def _fill(executor: Executor, data: bytes, tokens: int, rows: int, masks: int) -> None:
    """Write inputs as the leader has sent them."""
    at = 0
    for part in inputs_of(executor.plan, executor, tokens, rows, masks):
        part.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8, part.nbytes, at)
        at += part.nbytes
    executor.upload(None if masks < 0 else masks)


def main() -> int:
    """Load, answer, and follow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    job = msgspec.json.decode(commands.readline(), type=Job)
    try:
        executor, ranks = load(job)
    except ClocherError as error:
        _answer(answers, Answer(type(error).__name__, str(error)))
        return 1
    _answer(answers, Answer())
    try:
        if store := commands.readline().decode().strip():
            ranks.connect(store)
            follow(executor, commands)
    except ClocherError as error:
        sys.stderr.write(f"rank {job.rank}: {error}\n")
        return 1
    finally:
        executor.close()
    return 0


def _answer(answers: BinaryIO, answer: Answer) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
