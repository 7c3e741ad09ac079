r"""Drafting tokens: what it wins on text that repeats itself, and costs on text that does not.

\b
    python -m bench.speculation --model-dir DIR [--streams 8]
    python -m bench.speculation --model-dir DIR --llama-server BINARY
        [--llama-args "--spec-type ngram-simple"]
    python -m bench.speculation --model-dir DIR --diffusion lossless --workload own
        --prompt 64

The same prompts with guesses, without, and on llama-server, in turns; every round has others. Speed
is that of decode steps, ours with all the host's work in them, the peer's as its own timings say. A
ratio is the median over rounds of guesses over none, with the smallest and the largest. Workloads
"continue", "edit" and "summarise" have answers that are given (bench/workloads.py): ours as the
tokens that a step drew, the peer's by a grammar of these tokens. The others are the model's own.
With --diffusion blocks of masks are denoised instead of guesses made, and only "lossless" has to
give the same ids.
"""

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.measure import NotMeasured
from bench.ops.experiment import FILE, MODEL_DIR, TEAM, Listed, Row, experiment, opened, turns
from bench.serving import servers
from bench.workloads import GIVEN, WORKLOADS, Case, Source
from clocher_runtime.config.engine import SPECULATE, EngineConfig
from clocher_runtime.convert.synthetic import GGUF_NAME
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.speculation.speculator import Counts
from clocher_runtime.text.tokenizer import Tokenizer

ON, OFF = "Clocher, guessing", "Clocher"
_TEXT = Path(__file__).parent.parent / "tests/data/valid.txt"
_CONTEXT = 2048
_PATIENCE_S = 600


@dataclass(slots=True)
class Run:
    """What one round came to.

    Attributes:
        tok_s: tokens a second of the steps that only decode.
        ids: that each stream made.
        passes, tokens: of the sequences in these steps.
        drafted, accepted: guesses.
    """

    tok_s: float
    ids: list[list[int]]
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Told:
    """Makes a session draw the tokens of given answers, whatever its logits say.

    It changes what a step has drawn after the step has drawn it, so a step costs what it costs.

    Args:
        session: on the CPU, where the inputs of a step are arrays that can be written to.
    """

    def __init__(self, session: Session) -> None:
        self.texts: list[list[int]] = []
        self._scheduler, executor = session.scheduler, session.executor
        self._array, self._fetch = executor.array, executor.fetch
        executor.fetch = self.fetch  # type: ignore[method-assign]

    def fetch(self, name: str, count: int) -> np.ndarray:
        """Return the rows of a buffer, those of what was drawn with the answers in it."""
        found = self._fetch(name, count)
        if name != "sampled" or not self.texts:
            return found
        texts = {r.slot: self.texts[r.index] for r in self._scheduler._running}
        for row, token in enumerate(self._array("rows")[:count].tolist()):
            # A step leaves its tokens one position on, where the drawn ones belong.
            text = texts[int(self._array("slots")[token])]
            position = int(self._array("positions")[token])
            if position < len(text):
                found[row] = self._array("ids")[token] = text[position]
        return found


@dataclass(slots=True)
class Ours:
    """A session that is measured.

    Attributes:
        runs: of every round, the one that is thrown away too.
    """

    session: Session
    new: int
    runs: list[Run] = field(default_factory=list)
    told: Told = field(init=False)

    def __post_init__(self) -> None:
        self.told = Told(self.session)

    def run(self, cases: Sequence[Case]) -> Run:
        """Answer some prompts side by side."""
        given = bool(cases[0].answer)
        self.told.texts = [case.prompt + case.answer for case in cases] if given else []
        new = min(len(case.answer) for case in cases) if given else self.new
        window, before = TimedWindow("speculation"), self._counts()
        ids: list[list[int]] = [[] for _ in cases]
        made = self.session.generate(
            [case.prompt for case in cases], new, cases[0].sampling, frozenset(), window
        )
        passes = 0
        for token in made:
            ids[token.sequence].append(token.id)
            passes += token.forwards
        steps = [span for span in window.spans if span.kind == "decode"]
        tokens = sum(span.tokens for span in steps)
        tok_s = tokens / (sum(span.ns for span in steps) / 1e9)
        if self.session.diffusion != "off":
            return Run(tok_s, ids, passes, sum(map(len, ids)))
        return Run(tok_s, ids, *(self._counts() - before).tolist())

    def _counts(self) -> np.ndarray:
        speculator = self.session.scheduler.speculator
        counts = speculator.counts if speculator is not None else Counts()
        return np.array([counts.forwards, counts.tokens, counts.drafted, counts.accepted])


@dataclass(slots=True)
class Llama:
    """A llama-server that is measured, one stream.

    Attributes:
        url: of it.
        new: tokens to make.
    """

    url: str
    new: int
    runs: list[Run] = field(default_factory=list)

    def run(self, cases: Sequence[Case]) -> Run:
        """Answer a prompt.

        Raises:
            NotMeasured: it does not answer, or with another number of tokens.
        """
        (case,) = cases
        new = len(case.answer) or self.new
        asked: dict[str, Any] = {"prompt": case.prompt, "n_predict": new, "ignore_eos": True}
        asked |= {"temperature": case.sampling.temperature, "seed": 1, "cache_prompt": False}
        asked |= {"return_tokens": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if case.answer:
            words = " ".join(f"<[{token}]>" for token in case.answer)
            asked |= {"grammar": f"root ::= {words}", "ignore_eos": False}
        data = json.dumps(asked).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", data, head)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                found = json.load(answer)
            times, ids = found["timings"], [int(token) for token in found["tokens"]]
            if times["predicted_n"] < new:
                raise NotMeasured(f"llama-server made {times['predicted_n']} tokens of {new}")
            drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
            passes = times["predicted_n"] - accepted
            counts = passes, times["predicted_n"], drafted, accepted
            return Run(float(times["predicted_per_second"]), [ids], *counts)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotMeasured(f"llama-server: {error}") from None


def compare(
    workload: str,
    contestants: dict[str, Ours | Llama],
    source: Source,
    streams: int,
    rounds: int,
    is_lossless: bool = True,
) -> Iterator[Row]:
    """Yield what each contestant makes of a workload, in turns, a new text each round.

    Args:
        is_lossless: whether guessing has to give the ids of not guessing.
    """
    make, first = WORKLOADS[workload], 1000 * list(WORKLOADS).index(workload)

    def run(contestant: Ours | Llama) -> float:
        number = first + len(contestant.runs) * streams
        contestant.runs.append(contestant.run([make(source, number + i) for i in range(streams)]))
        return contestant.runs[-1].tok_s

    for contestant in contestants.values():
        contestant.runs.clear()
    runs: dict[str, Callable[[], float]] = {n: partial(run, c) for n, c in contestants.items()}
    turns(runs, rounds)
    kept = {name: contestant.runs[1:] for name, contestant in contestants.items()}
    for name, measured in kept.items():
        drafted, accepted = (sum(getattr(r, n) for r in measured) for n in ("drafted", "accepted"))
        row: Row = {
            "op": "speculation",
            "workload": workload,
            "engine": name,
            "streams": streams,
            "tok_s": median(r.tok_s for r in measured),
            "samples": [r.tok_s for r in measured],
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": accepted / drafted if drafted else None,
            "tokens": sum(len(ids) for r in measured for ids in r.ids),
        }
        if passes := sum(r.passes for r in measured):
            row["tokens_per_pass"] = sum(r.tokens for r in measured) / passes
        if name == OFF:
            yield row
            continue
        key = "over_off" if name == ON else "over_peer"
        over, under = (measured, kept[OFF]) if name == ON else (kept[ON], measured)
        ratios = [a.tok_s / b.tok_s for a, b in zip(over, under, strict=True)]
        row |= {key: median(ratios), f"{key}_range": [min(ratios), max(ratios)]}
        same = [a.ids == b.ids for a, b in zip(measured, kept[OFF], strict=True)]
        row |= {"same_ids": f"{sum(same)}/{len(same)}"}
        if name == ON and is_lossless:
            row["correct"] = all(same)
        yield row


def _session(model: Model, threads: int, streams: int, **guesses: str) -> Session:
    context = min(model.spec.max_positions, _CONTEXT)
    session = Session(
        model,
        EngineConfig(threads=threads, batch=streams, context=context, **guesses),
    )  # type: ignore[arg-type]
    session.warm()
    return session


@experiment(
    "speculation",
    __doc__,
    "workload | streams | engine | tok/s | tokens a pass | drafted | accepted | "
    "guesses / none | Clocher / peer | same ids",
    "{workload} | {streams} | {engine} | {tok_s:.1f} | {tokens_per_pass:.2f} | {drafted} | "
    "{acceptance:.0%} | {over_off:.2f}x {over_off_range} | {over_peer:.2f}x {over_peer_range} | "
    "{same_ids}",
    title="{model} {format}, {threads} threads",
    rounds=5,
)
@MODEL_DIR
@click.option("--workload", "chosen", type=Listed.of(WORKLOADS), default=tuple(WORKLOADS))
@click.option("--text", type=FILE, default=_TEXT, help="Held-out code.")
@click.option("--new", type=click.IntRange(2, 1024), default=256, show_default=True)
@click.option("--prompt", type=click.IntRange(1, 1024), default=512, help="Tokens, at most.")
@click.option("--streams", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--speculate", type=click.Choice(SPECULATE), default="auto", show_default=True)
@click.option("--diffusion", help="Denoise blocks like this instead; workloads of one's own text.")
@click.option("--llama-server", help="Measure this program too, on --gguf; one stream only.")
@click.option("--gguf", type=FILE, help="default: model.gguf beside the model")
@click.option("--llama-args", multiple=True, default=("--spec-type none",), show_default=True)
@TEAM
def main(
    model_dir: Path | None,
    chosen: tuple[str, ...],
    text: Path,
    new: int,
    prompt: int,
    streams: int,
    speculate: str,
    diffusion: str | None,
    llama_server: str | None,
    gguf: Path | None,
    llama_args: tuple[str, ...],
    threads: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each workload and contestant."""
    if llama_server and streams > 1:
        raise click.UsageError("--llama-server is measured with --streams 1")
    if diffusion and (given := [name for name in chosen if name in GIVEN]):
        raise click.UsageError(f"--diffusion has no given answers; leave out {', '.join(given)}")
    model = opened(model_dir)
    tokenizer = Tokenizer(model.checkpoint.tokenizer_source, model.checkpoint.tokenizer_config)
    words = text.read_text(encoding="utf-8")
    source = Source(words, tokenizer.encode, model.spec.vocab_size, new, prompt)
    about = {"model": model.checkpoint.path.name, "format": model.precision, "threads": threads}
    with ExitStack() as stack:
        contestants: dict[str, Ours | Llama] = {}
        asked = {"speculate": speculate} if diffusion is None else {"diffusion": diffusion}
        for name, guesses in ((ON, asked), (OFF, {"speculate": "off", "diffusion": "off"})):
            session = stack.enter_context(closing(_session(model, threads, streams, **guesses)))
            contestants[name] = Ours(session, new)
        for arguments in llama_args if llama_server else ():
            path = gguf or (model_dir and model_dir / GGUF_NAME)
            if not path or not path.is_file():
                raise NotMeasured(f"llama-server: no GGUF file ({path}); give --gguf")
            line = f"-t {threads} {arguments}"
            server = servers.llama(str(llama_server), path, 1, _CONTEXT, line)
            target = stack.enter_context(server).target
            url = f"http://{target.host}:{target.port}"
            contestants[f"llama-server {arguments}"] = Llama(url, new)
        for workload in chosen:
            exact = diffusion in (None, "auto", "lossless")
            for row in compare(workload, contestants, source, streams, rounds, exact):
                click.echo(json.dumps({**about, **row}))
                yield {**about, **row}


if __name__ == "__main__":
    main()
