"""A setting: a config field and all ways to give it; also the source of help and docs/cli.md."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from clocher_runtime.config.values import Value


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting is given.

    `env`: variables, the strongest first; each flag also has one of its own name (`--max-new`:
    CLOCHER_MAX_NEW). `idle`: values that ask for what happens anyway. `only`: commands that have
    it; empty: all. The flag of a 0/1 setting takes no value.
    """

    group: str
    takes: Value
    help: str
    flag: str = ""
    env: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


class Given(NamedTuple):
    """How a field was set: the flag or variable, and its text."""

    source: str
    raw: str

    def __str__(self) -> str:
        return f"{self.source}={self.raw}"

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return not isinstance(self, GivenInFile) and not self.source.startswith("-")


class GivenInFile(Given):
    """A setting from a file; the source names the file and the key."""

    __slots__ = ()


def flag(group: str, takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field whose flag has its name."""
    return _field(Setting(group, takes, help, "--", env), **more)


def variable(takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field that has no flag."""
    return _field(Setting("", takes, help, "", env), **more)


def internal(takes: Value, help: str, **more: Any) -> Any:
    """Declare a field that only code sets."""
    return _field(Setting("", takes, help), **more)


def _field(
    setting: Setting, idle: tuple[str, ...] = (), only: tuple[str, ...] = (), **more: Any
) -> Any:
    default = more.get("default", setting.takes.unset)
    return field(default=default, metadata={"setting": replace(setting, idle=idle, only=only)})


def redefault(config: type[Any], name: str, default: Any) -> Any:
    """Declare a field of a subclass with a new default."""
    metadata = config.__dataclass_fields__[name].metadata
    return field(default=default, metadata=metadata)


def every(config: type[Any]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of a config record by field name."""
    for each in fields(config):
        if setting := each.metadata.get("setting"):
            yield each.name, _named(each.name, setting) if setting.flag else setting


def declared(config: type[Any]) -> dict[str, Setting]:
    """Return the settings of a config record that its command line has."""
    return {
        name: setting
        for name, setting in every(config)
        if setting.flag or setting.env
        if not setting.only or config.command in setting.only
    }


def defaults(config: type[Any]) -> dict[str, Any]:
    """Return the default of each field of a config record."""
    return {each.name: each.default for each in fields(config)}


def _named(name: str, setting: Setting) -> Setting:
    env = dict.fromkeys((f"CLOCHER_{name.upper()}", *setting.env))
    return replace(setting, flag=f"--{name.replace('_', '-')}", env=tuple(env))


def unmet(
    given: Mapping[str, Given], settings: Mapping[str, Setting], names: Collection[str]
) -> tuple[str, ...]:
    """Return settings that were given and have no effect, as "source=value"."""
    found = [(setting, given[n]) for n, setting in settings.items() if n in names and n in given]
    return tuple(str(how) for setting, how in found if how.raw not in setting.idle)
