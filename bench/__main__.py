"""Run a case of the one bench: `python -m bench NAME [FLAGS]`; without a name, list them."""

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

import click

CASES = {
    "harness": ("bench.harness:command", "clocher-run in fresh processes, in turns; sweeps"),
    "strict": ("bench.strict:main", "speed by the strict contract: three windows, and checks"),
    "peers": ("bench.peers:main", "a model beside llama.cpp, ik_llama.cpp, OpenVINO GenAI"),
    "linear": ("bench.linear:main", "matrix products: roofline, decoded ahead, torch's floats"),
    "block_sparse": ("bench.linear:sparse", "dense against block-sparse products"),
    "real": ("bench.real:main", "published files: KLD, perplexity beside llama.cpp"),
    "quantise": ("bench.quantise:main", "loss of each method at its bytes, real weights"),
    "profile": ("bench.profile:main", "where the time of a step goes, flame graph, overhead"),
    "speculation": ("bench.speculation:main", "drafts beside none on texts of several kinds"),
    "schemas": ("bench.schemas:main", "JSON schemas of a suite: coverage, time of masks"),
    "tools": ("bench.tools:main", "tool calls of a suite, asked of servers in turns"),
    "ptq_calib": ("bench.ptq_calib:main", "cosine of min-max INT8, and a gate"),
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
    command: click.Command = resolve_name(CASES[name][0])
    command.main(rest, prog_name=f"python -m bench {name}")


if __name__ == "__main__":
    main()
