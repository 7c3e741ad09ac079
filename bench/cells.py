"""Cells, each one engine configuration: from make's variables, a file, flags and a sweep."""

import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path

import clocher_runtime
from clocher_kernels.errors import UsageError
from clocher_runtime.command.loading import choose_model
from clocher_runtime.config.commands import ALL, SETTINGS, RunConfig, resolve
from clocher_runtime.config.values import Given

MAX_CELLS = 10_000

DEFAULT = "default"

ALIASES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "act_quant": ("act_prec", {"none": DEFAULT}),
    "kv_quant": ("kv_dtype", {"none": DEFAULT, "int8": "i8", "fp8": "e4m3"}),
    "prefetch": ("prefetch_distance", {"off": "0", "on": "auto"}),
}
"""Name in a sweep -> the setting that it means, and what its values mean there."""

OF_MAKE: Mapping[str, str] = {
    "MODEL_DIR": "model_dir",
    "PROMPTS": "prompts_file",
    "ROUNDS": "rounds",
    "THREADS": "threads",
    "BATCH": "batch",
    "PREFETCH": "prefetch",
    "PRETRANSPOSE": "pretranspose",
    "MAX_NEW": "max_new",
    "WARMUP_TOKENS": "warmup",
}
"""Variables of make's targets -> settings, which have CLOCHER_ names in the program."""

_NOT_SWEPT = ("config", "outputs", "trace_ids", "trace_topk")
_MODEL_FILES = (".safetensors", ".bin", ".json", ".gguf")


def of_program(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with make's variables under the program's names, which win."""
    found = dict(environ)
    for variable, name in OF_MAKE.items():
        raw = found.pop(variable, "")
        if raw and not found.get(own := SETTINGS[name].env[0]):
            SETTINGS[name].takes.read(variable, raw)
            found[own] = raw
    return found


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration as text: all given settings, and those of the sweep."""

    label: str
    swept: Mapping[str, str]
    settings: Mapping[str, str]
    key: str = field(default="", compare=False)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the process environment; it has no engine settings but those of the cell."""
        variables = {variable for setting in ALL.values() for variable in setting.env}
        found = {name: value for name, value in environ.items() if name not in variables}
        return found | {ALL[name].env[0]: raw for name, raw in self.settings.items()}

    def config(self) -> RunConfig:
        """Return the configuration as the engine will see it."""
        given = {n: Given(ALL[n].flag or ALL[n].env[0], raw) for n, raw in self.settings.items()}
        return resolve({}, {}, given)


def base_settings(
    flags: Mapping[str, str], environ: Mapping[str, str], in_file: Mapping[str, Given]
) -> dict[str, str]:
    """Return every setting that was given, by its strongest source, as text."""
    config = resolve(flags, environ, in_file)
    found = {name: given.raw for name, given in config.given.items()}
    return {name: found[name] for name in ALL if name in found and name not in _NOT_SWEPT}


def parse_sweep(text: str) -> list[dict[str, tuple[str, str]]]:
    """Return the points of a sweep, the product in "name=value,value|name=value".

    A point has what was typed, "name=value", and the value's text, by setting.
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for part in filter(None, (part.strip() for part in text.split("|"))):
        typed, _, rest = (word.strip() for word in part.partition("="))
        name, meanings = ALIASES.get(typed, (typed, {}))
        if name not in ALL or name in _NOT_SWEPT:
            known = ", ".join(sorted(set(ALL) - set(_NOT_SWEPT) | set(ALIASES)))
            raise UsageError(f"--sweep: unknown setting {typed!r}; known are {known}")
        values = [value.strip() for value in rest.split(",")]
        if not all(values) or len(set(values)) < len(values):
            raise UsageError(
                f"--sweep: got {part!r}, expected {typed}=VALUE,VALUE without repetition"
            )
        if name in axes:
            raise UsageError(
                f"--sweep: {typed} names a setting that is swept already; name it once"
            )
        axes[name] = [(f"{typed}={value}", meanings.get(value, value)) for value in values]
        for _, raw in axes[name]:
            if raw != DEFAULT:
                ALL[name].takes.read(f"--sweep: {typed}", raw)
    if (points := prod(map(len, axes.values()))) > MAX_CELLS:
        raise UsageError(f"--sweep: {points} combinations; at most {MAX_CELLS} are run")
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def make_cells(settings: Mapping[str, str], sweep: str, label: str) -> list[Cell]:
    """Return the cells of a sweep, or one cell without a sweep."""
    cells = []
    for point in parse_sweep(sweep):
        swept = {name: raw for name, (_, raw) in point.items() if raw != DEFAULT}
        own = {name: raw for name, raw in settings.items() if name not in point} | swept
        words = filter(None, [label, *(typed for typed, _ in point.values())])
        ordered = {name: own[name] for name in ALL if name in own}
        cells.append(Cell(" ".join(words) or "bench", swept, ordered))
    return cells


def command_of(settings: Mapping[str, str], sweep: str, runs: int) -> str:
    """Return a command that runs a sweep: variables of the engine, then the harness."""
    words = [f"{name}={raw}" for name, raw in Cell("", {}, settings).environment({}).items()]
    words += ["python", "-m", "bench.harness", "--runs", str(runs)]
    return shlex.join([*words, *(["--sweep", sweep] if sweep else [])])


def content_key(cell: Cell, cwd: Path, machine: str) -> str:
    """Return the SHA-256 of settings, prompts, model file facts, package source and machine."""
    config = cell.config()
    content = {
        "settings": dict(cell.settings),
        "prompts": prompts_sha256(config),
        "model": [] if config.stub else _model_files(config, cwd),
        "code": code_sha256(),
        "machine": machine,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prompts_sha256(config: RunConfig) -> str | None:
    """Return the SHA-256 of the prompts file; None without one."""
    if config.prompts_file is None:
        return None
    try:
        with config.prompts_file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"prompts file {config.prompts_file}: {error.strerror}") from None


@cache
def code_sha256() -> str:
    """Return the SHA-256 of the packages' source."""
    digest = hashlib.sha256()
    root = Path(clocher_runtime.__file__).parents[1]
    for package in ("clocher_kernels", "clocher_runtime", "cpu_fallback"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".cu"):
                digest.update(f"{path.relative_to(root)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _model_files(config: RunConfig, cwd: Path) -> list[tuple[str, int, int]]:
    choice = choose_model(config, cwd)
    folders = (choice.path / part for part in ("", "hf", "hf/original"))
    inside = [p for f in folders if f.is_dir() for p in f.iterdir() if p.suffix in _MODEL_FILES]
    named = (path for path in (choice.path, choice.data) if path is not None)
    found = [(str(path), path.stat()) for path in sorted(inside or named) if path.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]
