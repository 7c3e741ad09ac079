r"""Servers under load: ours, and llama-server on the same weights, in turns.

\b
    python -m bench.serving --url http://127.0.0.1:8000 --streams 1,8,32
    python -m bench.serving --serve DIR --llama-server BINARY --gguf DIR/model.gguf
    python -m bench.serving --serve DIR --case overhead --case batch --case intrusion
    python -m bench.serving --serve DIR --case disconnect --case kill --case soak --minutes 20

Cases: load (streams that ask again and again, and --rate: Poisson arrivals), overhead (one stream
beside the bare session), batch (eight streams beside it), intrusion (a long prompt arrives beside a
running stream), disconnect (clients leave at random moments; then a full queue), soak, kill (the
engine dies). Nothing is started unless --serve or --llama-server says so; what is measured runs
alone, others wait. Only answers with as many tokens as were asked for count, others are errors.
Times between tokens are those between chunks that carry one. A client CPU of 1 is a whole core,
which the server does not have.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from bench.measure import NotMeasured
from bench.ops.experiment import COUNTS, FILE, Listed, Row, experiment, opened
from bench.report.serving import figures
from bench.serving import cases, life, servers
from bench.serving.load import PATHS, Shape
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import default_threads

CASES = ("load", "overhead", "batch", "intrusion", "disconnect", "soak", "kill")
_BESIDE_SESSION = {"overhead", "batch"}
_BATCH = 8
_POSITIVE = click.FloatRange(0, min_open=True)


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e4:
        raise ValueError
    return value


@experiment(
    "serving",
    __doc__,
    "case | server | load, or figures | tok/s | TTFT p50/p99 ms | ITL p50/p95/p99 ms | good/s | "
    "tok/read | client CPU | server CPU | others % | errors",
    "{op} | {server} | {said} | {tok_s:.1f} | {ttft_p50_ms:.0f}/{ttft_p99_ms:.0f} | "
    "{itl_p50_ms:.1f}/{itl_p95_ms:.1f}/{itl_p99_ms:.1f} | {goodput_rps:.2f} | "
    "{tokens_per_read:.2f} | {client_cpu:.2f} | {server_cpu:.2f} | "
    "{others_percent:.0f} | {error_count}",
    title="bench.serving",
    rounds=3,
    good=lambda row: row.get("correct", not row.get("error_count")),
)
@click.option("--url", "urls", multiple=True, help="A server that runs: http://HOST:PORT.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="For --url.")
@click.option("--serve", "model_dir", type=FILE, help="Start clocher-serve on this model.")
@click.option("--serve-command", default="clocher-serve", show_default=True)
@click.option("--serve-args", default="", help="More flags for it, in one word.")
@click.option("--llama-server", help="Start this program on --gguf.")
@click.option("--gguf", type=FILE, help="default: model.gguf beside the model of --serve")
@click.option("--llama-args", default="", help="More flags for it, in one word.")
@click.option("--case", "chosen", type=click.Choice(CASES), multiple=True, default=("load",))
@click.option("--streams", type=COUNTS, default="1,2,4,8,16,32,64", show_default=True)
@click.option("--rate", "rates", type=Listed(_rate, "requests a second"), default=())
@click.option("--seconds", type=_POSITIVE, default=30.0, show_default=True, help="Of --rate.")
@click.option("--each", type=click.IntRange(1), default=1, show_default=True, help="A stream asks.")
@click.option("--endpoint", type=click.Choice(list(PATHS)), default="completions")
@click.option("--prompt", "length", type=click.IntRange(1), default=64, show_default=True)
@click.option("--new", type=click.IntRange(2), default=64, show_default=True)
@click.option("--vocab", type=click.IntRange(16), default=256, show_default=True, help="Ids below.")
@click.option("--slo", type=(_POSITIVE, _POSITIVE), help="ms: first token, p99 between tokens")
@click.option("--long", "long_", type=click.IntRange(1), default=3900, show_default=True)
@click.option("--disconnects", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--minutes", type=_POSITIVE, default=20.0, show_default=True, help="Of the soak.")
def main(rounds: int, chosen: tuple[str, ...], **options: Any) -> Iterator[Row]:
    """Yield the rows of the cases; each is printed as soon as it is there."""
    shape = Shape(*(options[name] for name in ("endpoint", "length", "new", "vocab", "slo")))
    with ExitStack() as stack:
        found = list(_servers(stack, options))
        if not found:
            raise click.UsageError("no server; give --url, --serve or --llama-server")
        session = None
        if options["model_dir"] and _BESIDE_SESSION & set(chosen):
            session = stack.enter_context(closing(_session(options["model_dir"])))
        about = {"prompt_tokens": shape.length, "new_tokens": shape.new}
        others = servers.others_percent(found)
        next(others)  # from now on
        for row in _rows(cases.Bench(found, shape, rounds, session), chosen, options):
            whole = {**about, **row, "said": figures(row) or row.get("load", "")}
            whole["others_percent"] = next(others)
            click.echo(json.dumps(whole))
            yield whole


def _rows(bench: cases.Bench, chosen: tuple[str, ...], options: dict[str, Any]) -> Iterator[Row]:
    if "load" in chosen:
        loads = (options[name] for name in ("streams", "rates", "each", "seconds"))
        yield from cases.loads(bench, *loads)
    if "overhead" in chosen:
        yield from cases.overhead(bench)
    if "batch" in chosen:
        yield from cases.batch(bench, _BATCH)
    if "intrusion" in chosen:
        yield from cases.intrusion(bench, options["long_"])
    server, most = bench.servers[0], max(options["streams"])
    soak = life.Soak(server, bench.shape, most, options["minutes"]) if "soak" in chosen else None
    yield from life.survival(server, bench.shape, chosen, options["disconnects"], soak)


def _servers(stack: ExitStack, options: dict[str, Any]) -> Iterator[servers.Server]:
    for url in options["urls"]:
        yield stack.enter_context(servers.at(url, options["api_key"]))
    model_dir: Path | None = options["model_dir"]
    if model_dir:
        words = options["serve_command"], options["serve_args"]
        yield stack.enter_context(servers.clocher(model_dir, *words))
    if options["llama_server"]:
        gguf = options["gguf"] or (model_dir and model_dir / "model.gguf")
        if not gguf or not gguf.is_file():
            raise NotMeasured(f"llama-server: no GGUF file ({gguf}); give --gguf")
        streams = max(*options["streams"], _BATCH)
        tokens = streams * (options["length"] + options["new"] + 64) + options["long_"] + 4096
        words = options["llama_server"], gguf, streams, tokens
        yield stack.enter_context(servers.llama(*words, options["llama_args"]))


def _session(model_dir: Path) -> Session:
    model = opened(model_dir)
    threads = default_threads()
    session = Session(
        model, EngineConfig(threads=threads, batch=_BATCH, prefix_cache=True, speculate="off")
    )
    session.warm()
    return session


if __name__ == "__main__":
    main()
