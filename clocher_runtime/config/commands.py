"""The settings of `clocher run`, `chat` and `serve`; from flags, variables and a file to them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import BYTES, COUNT, HINTS, TOKENS, EngineConfig
from clocher_runtime.config.values import (
    IDS,
    ORIGINS,
    PATH,
    SWITCH,
    Given,
    Setting,
    declared,
    every,
    flag,
    integer,
    number,
    one_of,
    redefault,
    text,
    variable,
)

_TEXT = text()
_generation = partial(flag, "Generation")
_prompt = partial(flag, "Prompt")
_run = partial(flag, "Run")
_chat = partial(flag, "Chat")
_AHEAD = integer(0, 4096, "on", "off", "auto")
_server = partial(flag, "Server")
_PREFIX = "CLOCHER_"
MAX_BYTES = 1 << 20

# Matmuls accumulate in fp32 in any case, so a setting that asks for it is not ignored.
_HOST_MATH = "fp32"
_FILE = declared(EngineConfig)["config"]
Config = TypeVar("Config", bound=EngineConfig)
RANDOM = "random"
CONTINUED = 64
CHAT_TEMPERATURE = 0.7
"""For conversations with a model that has no sampling defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(EngineConfig):
    """The settings of the engine and of sampling."""

    temperature: float = _generation(number(0, 100), "0 takes the most likely token", default=0.0)
    top_k: int = _generation(COUNT, "sample from the k most likely; 0: all", default=0)
    top_p: float = _generation(
        number(1e-6, 1), "sample from the most likely that sum to this probability", default=1.0
    )
    min_p: float = _generation(
        number(0, 1), "drop tokens less likely than this share of the most likely one", default=0.0
    )
    repetition_penalty: float = _generation(
        number(0.01, 100), "above 1: tokens in the text become less likely", default=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SamplingConfig):
    """The settings of a run; for None see the help."""

    command: ClassVar[str] = "run"
    hints: ClassVar[Mapping[str, Setting]] = HINTS
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("prompt", "prompt_ids", "prompts_file"),
        *EngineConfig.exclusive,
    )

    prompt: str | None = _prompt(
        _TEXT, "text to complete; - reads standard input, as a pipe without this flag is"
    )
    prompt_ids: tuple[int, ...] | None = _prompt(IDS, "token ids to complete")
    prompts_file: Path | None = _prompt(
        PATH, 'one prompt per line; *.jsonl: {"prompt": "..."} or {"ids": [...]} per line'
    )
    max_new: int = _generation(TOKENS, "tokens to generate per prompt", default=64)
    seed: int = _generation(integer(0, (1 << 64) - 1), "same seed, same tokens", default=0)
    rounds: int = _run(integer(1, 1_000_000), "times to run every prompt", default=1)
    warmup: int = _run(integer(0, 1 << 24), "tokens to generate before the timed window", default=0)
    prefetch: int | str = _run(
        _AHEAD,
        "tokenise ahead: auto only between batches, off never, on or N (batches) beside the model",
        default="auto",
    )
    json: bool = _run(SWITCH, "the line of JSON on standard output, also where that is a terminal")
    aggregate: bool = _run(SWITCH, "report totals only: outputs stays empty in the JSON line")
    outputs: Path | None = _run(PATH, "write ids and text of every prompt to this file, JSONL")
    trace_ids: Path | None = _run(
        PATH, "write prompt and generated ids of each prompt to this file, JSONL, to be verified"
    )
    trace_topk: int = _run(
        integer(1, 1000), "with --trace-ids: also the N largest logits of each step", default=0
    )
    bytes_per_token: int = variable(
        BYTES,
        "bytes of the weight files to walk over per token; 0: none",
        "IE_BYTES_PER_TOKEN",
        default=0,
    )
    stride_bytes: int = variable(
        integer(1, 1 << 40),
        "distance of the bytes that the walk reads",
        "IE_STRIDE_BYTES",
        default=256,
    )
    verify_touch: bool = variable(SWITCH, "1: report the checksum of the walk", "IE_VERIFY_TOUCH")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(SamplingConfig):
    """The settings of a chat; for None see the help."""

    command: ClassVar[str] = "chat"

    prompt: str | None = _chat(_TEXT, "a question: answer it once, and end")
    system: str | None = _chat(_TEXT, "the system message of the conversation")
    reasoning_effort: str | None = _chat(
        one_of("none", "minimal", "low", "medium", "high", "xhigh"),
        "how much the model thinks, as far as its chat template can say it",
    )
    hide_thinking: bool = _chat(SWITCH, "do not show what the model thinks")
    no_stats: bool = _chat(SWITCH, "no line of numbers after an answer")
    temperature: float = redefault(SamplingConfig, "temperature", CHAT_TEMPERATURE)
    seed: int | str = _generation(
        integer(0, (1 << 64) - 1, RANDOM),
        "a number draws the same answer to the same conversation each time",
        default=RANDOM,
    )
    max_new: int | None = _generation(
        TOKENS,
        "tokens of an answer (unset: as many as the context has room for; "
        f"{CONTINUED} where text is continued)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """The engine and the HTTP settings of a server."""

    command: ClassVar[str] = "serve"

    batch: int = redefault(EngineConfig, "batch", 8)

    host: str = _server(
        text("ADDRESS"),
        "address to listen on; others than this machine's need a key",
        default="127.0.0.1",
    )
    port: int = _server(integer(0, 65535), "port to listen on; 0: a free one", default=8000)
    api_key: str | None = _server(
        _TEXT, "what clients have to know; better given by its variable", "CLOCHER_API_KEY"
    )
    served_model_name: str | None = _server(
        _TEXT, "what clients call the model (unset: the last part of its path)"
    )
    cors_origins: str | None = _server(
        ORIGINS, "origins whose pages may call, commas between them (unset: none)"
    )
    no_page: bool = _server(SWITCH, "serve no chat page at /")
    queue: int = _server(
        integer(0, 65536),
        "requests that may wait beyond those in the batch; beyond this, requests get 429",
        default=64,
    )
    timeout: float = _server(number(1, 86400), "seconds that a request may take", default=1800.0)
    drain: float = _server(
        number(0, 3600),
        "graceful-shutdown timeout in seconds, after SIGTERM or Ctrl-C",
        default=30.0,
    )
    max_body_mb: int = _server(integer(1, 1024), "MiB of the largest request", default=8)
    no_prefix_cache: bool = flag("Cache", SWITCH, "disable prefix caching")

    def settled(self) -> Self:
        """Return it, if others reach it with a key only. Raises UsageError."""
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise UsageError("--api-key: expected ASCII characters that are not all spaces")
        if self.served_model_name == "":
            raise UsageError("--served-model-name is empty; give a name, or leave it out")
        if self.api_key is None and not is_local(self.host):
            raise UsageError(
                f"--host {self.host}: others could reach the server and there is no key; set "
                "CLOCHER_API_KEY, or listen on 127.0.0.1"
            )
        return self


SETTINGS: Mapping[str, Setting] = declared(RunConfig)
ALL: Mapping[str, Setting] = {**SETTINGS, **HINTS}
TABLE: Mapping[str, Setting] = declared(ServeConfig)
SCORE_ROWS = 64
_OTHERS = ("CACHE_DIR", "EMBEDDED", "OFFLINE", "TILE_CACHE_MB")
"""Variables after CLOCHER_ that are no settings of a command."""


def warnings(config: EngineConfig, environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable in use without a prefix, and each unknown CLOCHER_..."""
    given = [str(each) for each in config.given.values() if each.is_variable]
    names = [each for each in given if not each.startswith((_PREFIX, "IE_"))]
    found = [f"{each} is read from the environment" for each in names]
    kinds = (RunConfig, ChatConfig, ServeConfig)
    known = {env for kind in kinds for _, each in every(kind) for env in each.env}
    known |= {_PREFIX + name for name in _OTHERS}
    for name in sorted(each for each in environ if each.startswith(_PREFIX)):
        if name not in known and not name.startswith(f"{_PREFIX}TEST_"):
            import difflib  # late: rare

            near = difflib.get_close_matches(name, known, 1, 0)[0]
            found.append(f"{name}: no such variable, it is ignored; the nearest is {near}")
    return found


def of_engine(config: ServeConfig) -> ServeConfig:
    """Return the configuration of a server's engine, which has no key."""
    given = {
        name: how for name, how in config.given.items() if name not in ("api_key", "chat_template")
    }
    return replace(
        config,
        prefix_cache=not config.no_prefix_cache,
        score_rows=SCORE_ROWS,
        keep_mapped=True,
        api_key=None,
        chat_template=None,  # prompts are not made there
        given=given,
    )


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    import ipaddress  # late: runs do without it

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def settle(
    kind: type[Config],
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, Given] | None = None,
) -> Config:
    """Return a configuration: flag, variable, file, default. Raises UsageError.

    `in_file` None reads the file of `--config`. An overridden value is not checked.
    """
    table = {**declared(kind), **kind.hints}
    if in_file is None:
        named = sources_of("config", _FILE, flags, environ, {})
        path = Path(named[0].raw) if named and named[0].raw else None
        texts = setting_texts(read_toml(path), {*table} - {"config"}, str(path)) if path else {}
        in_file = {name: Given(f"{path}: {name}", raw) for name, raw in texts.items()}
    values: dict[str, Any] = {}
    given: dict[str, Given] = {}
    ignored: list[Given] = []
    for name, setting in table.items():
        found = sources_of(name, setting, flags, environ, in_file)
        if not found:
            continue
        first, *others = found
        given[name], value = first, setting.takes.read(first.source, first.raw)
        if name in kind.hints:
            ignored += [] if first.raw in setting.idle else [first]
            continue
        values[name] = value
        if name not in flags:
            beaten = [other for other in others if other.is_variable]
            ignored += [other for other in beaten if other.raw not in (first.raw, _HOST_MATH)]
    for names in kind.exclusive:
        _keep_one(names, values, given)
    return kind(**values, given=given, hints_ignored=tuple(map(str, ignored))).settled()


resolve = partial(settle, RunConfig)
"""Returns the configuration of a run."""


def sources_of(
    name: str,
    setting: Setting,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, Given],
) -> list[Given]:
    """Return the flag, variables and file key that are set, the strongest first."""
    found = [Given(setting.flag, flags[name])] if name in flags else []
    found += [Given(var, environ[var]) for var in setting.env if environ.get(var)]
    return found + ([in_file[name]] if name in in_file else [])


def _keep_one(names: Sequence[str], values: dict[str, Any], given: dict[str, Given]) -> None:
    """Settle exclusive settings: the stronger source wins, a tie is an error."""

    def rank(name: str) -> int:
        how = given[name]
        return int(how.is_variable) if how.is_variable or how.source[0] == "-" else 2

    first, *others = sorted((name for name in names if name in given), key=rank) or [""]
    for name in others:
        if rank(name) == rank(first):
            sources = given[first].source, given[name].source
            raise UsageError(f"{' and '.join(sources)} exclude each other; give one")
        del values[name], given[name]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file of at most 1 MiB. Raises UsageError."""
    import tomllib  # late: few runs have a file

    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"{path}: not a regular file; give a TOML file with settings")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES} bytes; is it a settings file?")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a TOML file with settings") from None
    except (ValueError, RecursionError) as error:  # invalid TOML and invalid UTF-8
        raise UsageError(f"{path}: not TOML: {error}") from None


def setting_texts(table: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, str]:
    """Return name -> the text its flag would get (lists joined by commas). Raises UsageError."""
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UsageError(
            f"{where}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    return {name: _text(value, f"{where}: {name}") for name, value in table.items()}


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        return ",".join(_text(item, where) for item in value)
    raise UsageError(f"{where}: got a {type(value).__name__}, expected text, a number or a list")
