"""Run a case of the one bench: `python -m bench NAME [FLAGS]`; without a name, list them."""

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

import click

CASES = {
    "harness": ("bench.harness", "clocher-run in fresh processes, in turns; sweeps, comparisons"),
    "strict": ("bench.strict", "speed by the strict contract: three windows, and checks"),
    "peers": ("bench.cases.peers", "a model beside llama.cpp, ik_llama.cpp, OpenVINO GenAI"),
    "linear": ("bench.cases.linear", "matrix products: roofline, decoded ahead, torch"),
    "attention": ("bench.cases.attention", "attention of a step, for each dtype of the KV cache"),
    "block_sparse": ("bench.cases.block_sparse", "dense against block-sparse products"),
    "profile": ("bench.cases.profile", "where the time of a step goes, flame graph, overhead"),
    "start": ("bench.cases.start", "from the command to the first token"),
    "ptq_calib": ("bench.ptq_calib", "cosine of min-max INT8, and a gate"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the case that the first argument names."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        click.echo("Usage: python -m bench CASE [FLAGS]; each CASE has --help.\n")
        for case, (_, about) in CASES.items():
            click.echo(f"  {case:13} {about}")
        click.echo("\nSpeed of a model: clocher bench. Every op: make microbench.")
        return
    if name not in CASES:
        click.echo(f"error: no case {name!r}; cases are {', '.join(CASES)}", err=True)
        sys.exit(2)
    command = resolve_name(f"{CASES[name][0]}:main")
    if isinstance(command, click.Command):
        command.main(rest, prog_name=f"python -m bench {name}")
    else:
        sys.exit(command(rest))


if __name__ == "__main__":
    main()
