"""What `make bench`, `bench-cuda`, `bench-report` and `bench-verify` do.

Settings are environment variables, all checked before anything runs. Relative paths count from
MAKE_CALLED_FROM, else the repository, where `benchmarks` is a link to bench.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.cells import of_program
from bench.record import read_file
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.config.commands import resolve
from clocher_runtime.config.values import PATH, SWITCH, Value, integer, number, one_of, text
from clocher_runtime.exit_codes import ExitCode, exit_code

ROOT = Path(__file__).resolve().parents[1]
CALLED_FROM = "MAKE_CALLED_FROM"
RESULTS = "bench.jsonl"

VARIABLES: Mapping[str, tuple[Value, str, str]] = {
    "RUNS": (integer(1, 10_000), "3", "processes of each cell"),
    "REPORT": (SWITCH, "1", "1: write a report of the results, 0: none"),
    "REPORT_ROOT": (PATH, "build/bench", "folder of results and report"),
    "REPORT_SCRIPT": (PATH, "scripts/run_harness_report.py", "program that writes the report"),
    "REPORT_ARGS": (text("ARGS"), "", "more arguments for it"),
    "REPORT_TOKENS_MAX": (integer(0, 1 << 24), "64", "token ids of a prompt that are kept"),
    "REPORT_PATH": (PATH, "", "bench-verify: result file (unset: that of the last bench)"),
    "STRICT_REPORT_PATH": (PATH, "", "bench-verify: also a report of the strict window"),
    "VERIFY": (SWITCH, "1", "1: check the results afterwards (bench-verify), 0: do not"),
    "VERIFY_HF_IDS": (SWITCH, "0", "1: compare every token with Hugging Face transformers"),
    "HF_PY": (PATH, sys.executable, "Python with transformers, click, msgspec"),
    "HF_DIR": (PATH, "", "Hugging Face model (unset: MODEL_DIR, or the embedded model)"),
    "HF_DEVICE": (one_of("cpu", "cuda"), "cpu", "where it runs"),
    "HF_DTYPE": (one_of("fp32", "fp16", "bf16"), "", "precision that it runs in"),
    "HF_TOPK": (integer(1, 1000), "", "candidates of each step to compare"),
    "HF_LOGITS_TOL": (number(0, 1e6), "", "allowed difference of logits"),
}
"""Variable -> type, default, help."""

_say = partial(click.echo, err=True)

# Variables of clocher-run whose values are input paths.
_PATHS = ("MODEL_DIR", "PROMPTS")
_FILES = ("REPORT_PATH", "STRICT_REPORT_PATH", "REPORT_SCRIPT")


@dataclass(slots=True)
class Call:
    """A call of make: environment with resolved paths, values of `VARIABLES`, harness flags."""

    environ: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    run: Callable[..., int] = subprocess.call

    @property
    def results(self) -> Path:
        """The result file; the report lies beside it."""
        return Path(self.values["REPORT_ROOT"]) / RESULTS

    def python(self, *words: object, python: object = sys.executable) -> int:
        """Run Python from the repository root; return its exit code."""
        return self.run([str(python), *map(str, words)], cwd=ROOT, env=self.environ)


def find(raw: str, called_from: Path, output: bool = False) -> Path:
    """Return the path that a variable means; an output need not exist."""
    typed = Path(raw).expanduser()
    tried = [Path(os.path.normpath(base / typed)) for base in (called_from, ROOT)]
    return next((path for path in tried if path.exists()), tried[output])


def set_up(environ: Mapping[str, str], flags: Sequence[str] = ()) -> Call:
    """Check all variables and resolve all paths; UsageError names a bad one."""
    resolve({}, of_program(environ))
    values: dict[str, Any] = {}
    for name, (kind, default, _) in VARIABLES.items():
        raw = environ.get(name) or default
        values[name] = kind.read(name, raw) if raw else None
    call = Call(dict(environ), values, flags)
    called_from = Path(environ.get(CALLED_FROM) or ROOT)
    for name in _PATHS:
        if environ.get(name):
            call.environ[name] = str(find(environ[name], called_from))
    if not environ.get("MODEL_DIR") and (called_from / "model.ie.json").is_file():
        _say(f"MODEL_DIR: {called_from}, the current directory")
        call.environ["MODEL_DIR"] = str(called_from)
    for name in ("REPORT_ROOT", "HF_DIR", *_FILES):
        if values[name] is not None:
            values[name] = find(str(values[name]), called_from, name == "REPORT_ROOT")
            if name in _FILES and not values[name].is_file():
                got = f"{name}: got {str(values[name])!r}"
                raise UsageError(f"{got}, expected a file that is there")
    return call


def bench(call: Call, device: str = "", again: bool = True) -> int:
    """Run the harness, then VERIFY, VERIFY_HF_IDS and REPORT; return the first bad exit code.

    What was measured goes into docs/PERFORMANCE.md with the report.
    """
    steps: dict[str, Callable[[Call], int]] = {
        "VERIFY": verify,
        "VERIFY_HF_IDS": partial(verify_ids, device=device),
        "REPORT": report,
    }
    if again and call.results.exists():
        os.replace(call.results, call.results.with_stem("bench.previous"))
    chosen = [f"--device={device}"] if device else []
    codes = [call.python("-m", "bench.harness", "--out", call.results, *chosen, *call.flags)]
    for name, step in steps.items():
        if codes[-1] in (ExitCode.OK, ExitCode.UNDECIDED) and call.values[name]:
            codes.append(step(call))
    if call.values["REPORT"] and codes[0] == codes[-1] == ExitCode.OK:
        codes.append(call.python("scripts/update_performance_md.py", "--add", call.results))
    return codes[-1] or max(codes)


def verify(call: Call, results: Path | None = None) -> int:
    """Check a result file; exit code 9 if every run was disturbed."""
    return call.python("-m", "bench.harness", "--verify", results or call.results)


def verify_strict(path: Path) -> int:
    """Print the failed checks of a bench.strict report; UsageError if it is none."""
    file = read_file(path)
    if file.kind != "strict":
        raise UsageError(
            f"STRICT_REPORT_PATH: {path} has no checks; write it with python -m bench.strict --json"
        )
    checks = file.rows[0]["checks"]
    failed = [f"{c['name']}: {c['detail']}" for c in checks if c["status"] == "fail"]
    for failure in failed:
        click.echo(f"verify: strict: {failure}")
    click.echo(f"verify: strict: {len(checks) - len(failed)} of {len(checks)} checks did not fail")
    return ExitCode.MISMATCH if failed else ExitCode.OK


def verify_ids(call: Call, device: str) -> int:
    """Generate again with a trace and compare it with Hugging Face transformers."""
    trace = call.results.parent / "trace.jsonl"
    topk = call.values["HF_TOPK"]
    engine = [sys.executable, "-m", "clocher_runtime.cli", "--ignore-eos", "--rounds", "1"]
    engine += ["--trace-ids", str(trace)]
    engine += ["--trace-topk", str(topk)] if topk else []
    engine += [f"--device={device}"] if device else []
    environ = of_program(call.environ) | {"CLOCHER_EMBEDDED": "1"}
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    if code := call.run(engine, cwd=ROOT, env=environ, **silent):
        return code
    embedded = ROOT / "clocher_runtime/assets/clocher-tiny-gptoss"
    directory = call.values["HF_DIR"] or call.environ.get("MODEL_DIR") or embedded
    script = ("scripts/verify_hf_generation_ids.py", "--check-prompt", "--trace-jsonl", trace)
    # It reads HF_DEVICE, HF_DTYPE, HF_TOPK and HF_LOGITS_TOL itself.
    more = ("--hf-dir", directory, "--out", call.results.parent / "hf-ids.json")
    return call.python(*script, *more, python=call.values["HF_PY"])


def report(call: Call) -> int:
    """Write the report of the result file."""
    words = [call.values["REPORT_SCRIPT"], call.results, "--out-dir", call.results.parent]
    words += ["--tokens-max", call.values["REPORT_TOKENS_MAX"]]
    words += ["--strict", strict] if (strict := call.values["STRICT_REPORT_PATH"]) else []
    return call.python(*words, *(call.values["REPORT_ARGS"] or "").split())


def bench_verify(call: Call) -> int:
    """Check the last results, or REPORT_PATH and STRICT_REPORT_PATH."""
    path = call.values["REPORT_PATH"] or call.results
    # The result file is next to its report.
    code = verify(call, path if path.suffix == ".jsonl" else path.with_name(RESULTS))
    strict = call.values["STRICT_REPORT_PATH"]
    return code or (ExitCode.OK if strict is None else verify_strict(strict))


def bench_report(call: Call) -> int:
    """Write the report; existing results are kept."""
    call.values["REPORT"] = True
    return bench(call, again=False)


TARGETS: Mapping[str, Callable[[Call], int]] = {
    "bench": bench,
    "bench-cuda": partial(bench, device="cuda"),
    "bench-report": bench_report,
    "bench-verify": bench_verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a target; return its exit code."""
    name, *flags = sys.argv[1:] if argv is None else argv
    try:
        if name not in TARGETS:
            raise UsageError(f"got {name}; expected one of {', '.join(TARGETS)}")
        return TARGETS[name](set_up(os.environ, flags))
    except (ClocherError, KeyboardInterrupt) as error:
        _say(f"{name}: error: {error or type(error).__name__}")
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
