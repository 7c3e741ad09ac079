"""What making prompts ready costs, and what doing it beside the model costs the model.

    python -m bench.prompt_pipeline [--model-dir DIR] [--batch N] [--json FILE]

"tokenise" rows read a file of prompts and tokenise it: a plain loop, and the pipeline of every
--prefetch with nobody to wait for. "generate" rows run the same prompts through the model: window
is the speed that the JSON line reports, elapsed that of a clock on the wall. Ratios are to "loop"
and to "off". "same ids" says that every row generated the same tokens.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

from bench.measure import Rows, interleave, ratio
from bench.ops.experiment import MODEL_DIR, Row, experiment
from clocher_runtime.command.completions import Completions
from clocher_runtime.command.console import Console
from clocher_runtime.command.loading import Engine, load_engine
from clocher_runtime.command.run import measure as measure_run
from clocher_runtime.command.run import pipeline
from clocher_runtime.command.settings import RunConfig
from clocher_runtime.engine.topology import usable_cpus
from clocher_runtime.text.prompts import Preparation, PromptSource

MODES: tuple[int | str, ...] = ("off", "auto", "on")
_WORDS = ("def", "class", "return", "import", "while", "self", "value", "index", "open", "write")


class Silent(Console):
    """Shows nothing."""

    def completion(self, text: str) -> None:
        """Drop a piece of text."""


class Generation:
    """Runs a file of prompts through the model, and remembers what came out.

    Attributes:
        elapsed: tokens a second of a clock on the wall, by mode and round.
        ids: hashes of all tokens of every run.
    """

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self._engine, self._config = engine, config
        self.elapsed: dict[int | str, list[float]] = {mode: [] for mode in MODES}
        self.ids: set[str] = set()

    def run(self, mode: int | str) -> float:
        """Return tokens a second of the window."""
        config = _with(self._config, mode)
        source = PromptSource(config.prompts_file)
        prepare = Preparation(source, self._engine.tokenizer, self._engine.session.check)
        batch = len(source.peek(config.batch))
        console = Silent()
        pipelines = partial(pipeline, config, self._engine, source, prepare, batch)
        with Completions(console, config) as completions:
            start = time.perf_counter()
            done = measure_run(self._engine, pipelines, config, batch, console, completions)
            self.elapsed[mode].append(done.tokens / (time.perf_counter() - start))
        source.close()
        text = repr([output["token_ids"] for output in completions.listed])
        self.ids.add(hashlib.sha256(text.encode("ascii")).hexdigest())
        return done.tokens / (done.wall_ns / 1e9)


def loop_rate(config: RunConfig, engine: Engine) -> float:
    """Return prompts a second of a plain loop."""
    source = PromptSource(config.prompts_file)
    prepare = Preparation(source, engine.tokenizer, engine.session.check)
    start = time.perf_counter()
    count = sum(1 for _ in map(prepare, source.lines()))
    elapsed = time.perf_counter() - start
    source.close()
    return count / elapsed


def pipeline_rate(config: RunConfig, engine: Engine, mode: int | str) -> float:
    """Return prompts a second of a pipeline whose micro-batches nobody uses."""
    config = _with(config, mode)
    source = PromptSource(config.prompts_file)
    prepare = Preparation(source, engine.tokenizer, engine.session.check)
    start = time.perf_counter()
    with pipeline(config, engine, source, prepare, config.batch) as groups:
        count = sum(map(len, groups))
    elapsed = time.perf_counter() - start
    source.close()
    return count / elapsed


def write_prompts(path: Path, count: int, words: int) -> Path:
    """Write a file of prompts, all of them different."""
    lines = []
    for number in range(count):
        chosen = [_WORDS[(number * 7 + at * at) % len(_WORDS)] for at in range(words)]
        lines.append(f"# {number}: {' '.join(chosen)}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def measure(
    engine: Engine, tokenise: RunConfig, generate: RunConfig, rounds: int
) -> tuple[Rows, bool]:
    """Return the rows, and whether all runs generated the same."""
    runs: dict[str, Callable[[], float]] = {"loop": partial(loop_rate, tokenise, engine)}
    runs |= {str(mode): partial(pipeline_rate, tokenise, engine, mode) for mode in MODES}
    rows = _rows("tokenise", "prompts_s", interleave(runs, rounds), "loop")
    generation = Generation(engine, generate)
    found = interleave({str(m): partial(generation.run, m) for m in MODES}, rounds)
    rows += _rows("generate, window", "tok_s", found, "off")
    elapsed = {str(mode): speeds[1:] for mode, speeds in generation.elapsed.items()}
    rows += _rows("generate, elapsed", "tok_s", elapsed, "off")
    return rows, len(generation.ids) == 1


def _rows(test: str, unit: str, found: Mapping[str, list[float]], base: str) -> Rows:
    rows: Rows = []
    for name, speeds in found.items():
        over = ratio(speeds, found[base])
        rows.append(
            {
                "op": "prompt_pipeline",
                "test": test,
                "prefetch": name,
                "unit": unit,
                "speed": median(speeds),
                "samples": speeds,
                "ratio": over.value,
                "ratio_95": [over.low, over.high],
            }
        )
    return rows


def _with(config: RunConfig, mode: int | str) -> RunConfig:
    return RunConfig(
        prompts_file=config.prompts_file,
        batch=config.batch,
        max_new=config.max_new,
        ignore_eos=True,
        prefetch=mode,
    )


@experiment(
    "prompt_pipeline",
    __doc__,
    "test | prefetch | speed | ratio | same ids",
    "{test} | {prefetch} | {speed:.0f} {unit} | "
    "{ratio:.2f}x [{ratio_95[0]:.2f}, {ratio_95[1]:.2f}] | {correct}",
    title="{model}, batch {batch}, {threads} threads",
    rounds=9,
)
@MODEL_DIR
@click.option("--threads", type=click.IntRange(1), help="of the model; default: all cores")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True)
@click.option("--max-new", type=click.IntRange(1), default=16, show_default=True)
@click.option("--prompts", type=click.IntRange(1), default=64, help="To generate from.")
@click.option("--lines", type=click.IntRange(1), default=5000, help="To tokenise only.")
@click.option("--words", type=click.IntRange(1), default=40, help="Of a prompt.")
def main(
    model_dir: Path | None,
    threads: int | None,
    batch: int,
    max_new: int,
    prompts: int,
    lines: int,
    words: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield the rows; the exit code is 1 if the tokens differ."""
    with TemporaryDirectory() as place:
        tokenise, generate = (
            RunConfig(
                model_dir=model_dir,
                threads=threads,
                prompts_file=write_prompts(Path(place) / f"{count}.txt", count, words),
                batch=batch,
                max_new=max_new,
                ignore_eos=True,
                speculate="off",
            )
            for count in (lines, prompts)
        )
        engine = load_engine(generate, batch, lambda done, total: None)
        try:
            engine.session.warm()
            rows, same = measure(engine, tokenise, generate, rounds)
        finally:
            engine.session.close()
    about = {"model": engine.model, "threads": engine.threads, "batch": batch, "correct": same}
    about |= {"cpus": len(usable_cpus()), "words": words}
    yield from ({**row, **about} for row in rows)


if __name__ == "__main__":
    main()
