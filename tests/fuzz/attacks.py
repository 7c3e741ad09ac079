"""Hostile runs of `clocher-run` and of the converters, made up from one or more ingredients.

An ingredient spoils one thing (a flag, a variable, a file, a stream, a limit) and says with which
exit codes the run may end then. The same seed and number make the same attack. In texts `{here}`
stands for the directory of the run and `{cache}` for a kernel cache that runs share.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from clocher_kernels.errors import UsageError
from clocher_runtime.config.commands import ALL
from fuzz import hf_seeds
from fuzz.mutations import mutate_bytes, mutate_json, mutate_lines, words_of
from fuzz.readers import READERS, Mutator

OK, USAGE, MODEL, DEVICE, MEMORY, REJECTED = 0, 2, 3, 5, 6, 8
INTERRUPTED, TERMINATED = 130, 143
REFUSED = frozenset({OK, USAGE, MODEL, DEVICE, MEMORY})

MODEL_READERS = ("hf-index", "gguf", "iebin", "config", "tokenizer", "dedup", "block-sparse")
SCRIPTS = {
    "hf_to_iebin.py": ("--hf-dir", "--out-dir"),
    "hf_to_iebin_stream.py": ("--hf-dir", "--out-dir"),
    "convert_to_block_sparse.py": ("--model-dir", "--out-dir"),
    "dedup": ("--model-dir", ""),
    "ptq_from_hf.py": ("--hf-dir", "--out"),
}
"""Converter, of scripts/ or of `clocher`, -> flags of what it reads and what it writes."""

PLANTS = (
    *("missing", "link", "dangling", "loop", "fifo", "directory", "empty", "zero", "full", "deny"),
)
# Prompts and settings may come from a pipe; to wait for who writes it is then what was asked for.
_NO_PIPES = tuple(plant for plant in PLANTS if plant != "fifo")
_MAY_BE_PIPES = ("prompts_file", "config")

_TEXTS = (
    *("", "-", "--", "-1", "0", "1", "2", "7", " 1", "1_000", "0x10", "1e3", "1e999", "nan", "inf"),
    *("-0.0", "true", "none", "auto", "0.5", "1,2,3", "1,,2", "99999999999", "٣", "\x1b[2J\x07"),
    *("a\nb", "é" * 3000, "9" * 5000, "x" * 100_000, "\udcff", "\u202e\u0000"[:1], "😀" * 200),
    *("/", ".", "..", "/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "{here}/fifo"),
    *("{here}/m", "{here}/none/x", "~", "~nouser/x", "x" * 300, "{here}/out", "a" * 5000 + "/b"),
)
_OTHER_VARIABLES = (
    *("HOME", "XDG_CACHE_HOME", "TMPDIR", "LANG", "LC_ALL", "TERM", "COLUMNS", "NO_COLOR", "PWD"),
    *("CLOCHER_TILE_CACHE_MB", "HF_HOME", "TZ", "TRITON_CACHE_DIR", "MALLOC_ARENA_MAX", "USER"),
)
# Accepted, these may take for ever, as they were told to: such a run is interrupted.
_LONG = {"max_new": 4096, "rounds": 50, "warmup": 4096, "bytes_per_token": 1 << 22}
_STREAMS = {
    "stdin": ("closed", "null", "junk", "endless"),
    "stdout": ("closed", "full", "broken"),
    "stderr": ("closed", "full", "broken"),
}


@dataclass(slots=True)
class Attack:
    """One hostile run.

    Attributes:
        model: what --model-dir names below the directory of the run; "" for the embedded model.
        files: path below the directory of the run -> content.
        plants: (one of `PLANTS`, path) of what takes the place of a file.
        limits: name of a resource limit -> its value; "AS" counts from what the process has.
        signal: number of a signal and milliseconds from the start, or None.
        script: a converter to run instead of `clocher-run`.
        own: in a process of its own, not in a fork of one that has imported everything.
        codes: exit codes that are right.
        made_of: the ingredients.
    """

    seed: int
    index: int
    model: str = ""
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    plants: list[tuple[str, str]] = field(default_factory=list)
    streams: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    signal: tuple[int, int] | None = None
    cwd: str = "here"
    nobody: bool = False
    script: str = ""
    own: bool = False
    codes: frozenset[int] = frozenset({OK})
    made_of: list[str] = field(default_factory=list)

    def interrupt(self, dice: Random, number: int = 2) -> None:
        """Send a signal at a random moment of the run."""
        self.signal = (number, 20 + int(1000 * dice.random() ** 2))
        self.own = False  # an interpreter that is just starting shows a traceback of its own
        self.codes |= {OK, INTERRUPTED if number == 2 else TERMINATED, -15 if number == 15 else OK}


def compose(seed: int, index: int) -> Attack:
    """Return attack number `index` of a seed."""
    dice = Random(f"{seed}:attack:{index}")
    attack = Attack(seed, index, own=dice.random() < 0.06)
    if dice.random() < 0.04:
        _script(attack, dice)
        return attack
    kind = dice.choice(("llama", "llama", "llama", "embedded", "stub"))
    if kind == "stub":
        attack.flags += ["--stub"]
    elif kind == "llama":
        attack.model, attack.files = "m", {f"m/{k}": v for k, v in hf_seeds.llama().items()}
        attack.flags += ["--model-dir", "{here}/m", "--prompt", "ab"]
    attack.flags += ["--max-new", dice.choice(("1", "2", "9")), "--threads", "2"]
    attack.env = {"HOME": "{here}", "CLOCHER_CACHE_DIR": "{cache}", "PATH": "/usr/bin:/bin"}
    count = dice.choice((1, 1, 1, 2, 2, 3))
    for ingredient in dice.choices(list(_INGREDIENTS), list(_INGREDIENTS.values()), k=count):
        attack.made_of.append(ingredient.__name__.strip("_"))
        ingredient(attack, dice)
    if "flag" in attack.made_of and "--stub" in attack.flags:
        attack.codes |= {USAGE}  # it excludes others
    return attack


def _value(name: str, dice: Random) -> str:
    texts = [*_TEXTS, *(str(1 << bits) for bits in (10, 24, 31, 53, 64))]
    takes = ALL[name].takes.takes
    if takes.startswith("one of"):
        texts += takes.removeprefix("one of ").split(", ") * 9
    return dice.choice([text for text in texts if name not in _MAY_BE_PIPES or "fifo" not in text])


def _judge_value(attack: Attack, name: str, value: str, dice: Random) -> None:
    """Note which exit codes a setting may lead to."""
    try:
        ALL[name].takes.read("x", value)
    except UsageError:
        # One that is weaker than another is not looked at.
        attack.codes = frozenset({USAGE}) if len(attack.made_of) == 1 else attack.codes | {USAGE}
        return
    attack.codes |= REFUSED
    if name in _LONG and int(value) > _LONG[name]:
        attack.interrupt(dice)


def _flag(attack: Attack, dice: Random) -> None:
    name = dice.choice([name for name, setting in ALL.items() if setting.flag])
    setting = ALL[name]
    roll = dice.random()
    if roll < 0.05:
        attack.flags.append(dice.choice(("--no-such", "surplus", "-x", "--", setting.flag + "=")))
        attack.codes |= REFUSED
    elif setting.takes.metavar == "0|1":
        attack.flags.append(setting.flag)
        attack.codes |= REFUSED
    else:
        value = _value(name, dice)
        attack.flags += [setting.flag, value]
        attack.codes |= {USAGE} if value.startswith("-") else set()
        _judge_value(attack, name, value, dice)


def _variable(attack: Attack, dice: Random) -> None:
    if dice.random() < 0.3:
        variable = dice.choice(_OTHER_VARIABLES)
        # The C library reads the file that TZ names, and would wait for a pipe before we are there.
        texts = [text for text in _TEXTS if variable != "TZ" or "fifo" not in text]
        attack.env[variable] = dice.choice(texts).replace("\0", "")
        attack.codes |= {USAGE, MODEL} if variable.startswith("CLOCHER") else frozenset()
        return
    name = dice.choice([name for name, setting in ALL.items() if setting.env])
    variable, value = dice.choice(ALL[name].env), _value(name, dice)
    attack.env[variable] = value
    # It is read when the back end is imported.
    attack.own |= variable == "CLOCHER_ISA" and not (attack.signal or attack.limits)
    attack.codes |= REFUSED
    if value and name in _LONG and value.isascii() and value.isdigit():
        attack.interrupt(dice)


def _cache_place(attack: Attack, dice: Random) -> None:
    """A cache that cannot be used: rare, for all kernels are compiled then."""
    attack.env["CLOCHER_CACHE_DIR"] = dice.choice(("/proc/x", "~nouser/x", "{here}/m", "/dev/null"))
    if dice.random() < 0.9 and "--stub" not in attack.flags:
        attack.flags.append("--stub")
        attack.codes |= {USAGE}


def _settings_file(attack: Attack, dice: Random) -> None:
    lines = [f"{n} = {json.dumps(_value(n, dice))}" for n in dice.sample(sorted(ALL), 3)]
    text = "\n".join(
        lines + dice.sample(["max_new = 1", "[a]", "x = nan", "a.b.c = 1"], 2)
    ).encode()
    text = mutate_bytes(text, dice) if dice.random() < 0.5 else text
    attack.files["s.toml"] = text
    if dice.random() < 0.2:
        attack.plants.append((dice.choice(_NO_PIPES), "s.toml"))
    attack.flags += ["--config", "{here}/s.toml"]
    attack.codes |= REFUSED
    attack.interrupt(dice)


def _config(attack: Attack, dice: Random) -> None:
    files = hf_seeds.llama()
    name = dice.choice(("config.json",) * 4 + tuple(n for n in sorted(files) if "json" in n))
    files[name] = mutate_json(files[name], dice, words_of(files[name]))
    _use_model(attack, dict(files), "m")


@cache
def _mutator(name: str) -> Mutator:
    return Mutator(READERS[name], 0)


def _model(attack: Attack, dice: Random) -> None:
    name = dice.choice(MODEL_READERS)
    files = dict(_mutator(name).mutant(dice.randrange(1 << 30)))
    _use_model(attack, files, "m/m.gguf" if name == "gguf" and dice.random() < 0.5 else "m")


def _use_model(attack: Attack, files: dict[str, bytes], path: str) -> None:
    attack.model = path
    attack.files |= {f"m/{name}": data for name, data in files.items()}
    attack.flags += ["--model-dir", f"{{here}}/{path}"]
    attack.codes |= REFUSED


def _plant(attack: Attack, dice: Random) -> None:
    if not attack.model:
        _use_model(attack, dict(hf_seeds.llama()), "m")
    name = dice.choice(sorted(name for name in attack.files if name.startswith("m/")) + ["m"])
    attack.plants.append((dice.choice(PLANTS), name))
    attack.codes |= REFUSED


def _prompts(attack: Attack, dice: Random) -> None:
    name = dice.choice(("p.txt", "p.jsonl"))
    lines = [b'{"prompt": "ab"}', b'{"ids": [1, 2]}', b'{"ids": [1], "x": {"a": [1]}}']
    attack.files[name] = dice.choice(
        (
            mutate_lines(b"\n".join(lines), dice, ["ids", "prompt"]),
            dice.randbytes(3000),
            b"ab" * dice.choice((10, 1000, 200_000)),
            b'{"ids": [' + b"1," * 100_000 + b"1]}",
            b"\n" * 100_000,
            b"a\n" * 300,
            b"",
        )
    )
    if dice.random() < 0.2:
        attack.plants.append((dice.choice(_NO_PIPES), name))
    attack.flags = [f for f in attack.flags if f not in ("--prompt", "ab")]
    attack.flags += [
        "--prompts-file",
        f"{{here}}/{name}",
        "--batch",
        dice.choice(("1", "3", "999")),
    ]
    attack.codes |= REFUSED


def _stream(attack: Attack, dice: Random) -> None:
    stream = dice.choice(sorted(_STREAMS))
    attack.streams[stream] = dice.choice(_STREAMS[stream])
    if stream == "stdin":
        attack.flags = [f for f in attack.flags if f not in ("--prompt", "ab")] + ["--prompt", "-"]
        attack.codes |= REFUSED
    elif stream == "stdout":
        attack.codes |= REFUSED | {1}  # the line could not be written


def _limit(attack: Attack, dice: Random) -> None:
    name = dice.choice(("AS", "NPROC", "NOFILE", "FSIZE", "STACK", "DATA"))
    values = {"AS": (1 << 20, 1 << 26, 1 << 28), "DATA": (1 << 20, 1 << 28), "NPROC": (0, 1, 3)}
    values |= {"NOFILE": (12, 20, 40), "FSIZE": (0, 1, 9999), "STACK": (1 << 14, 1 << 18)}
    attack.limits[name] = dice.choice(values[name])
    attack.own &= name in ("NOFILE", "FSIZE")  # with the others no interpreter may start
    attack.nobody |= name == "NPROC"  # root is not held to it
    attack.flags += dice.choice(([], ["--outputs", "{here}/out"], ["--threads", "64"]))
    attack.codes |= REFUSED


def _place(attack: Attack, dice: Random) -> None:
    attack.cwd = dice.choice(("deleted", "/", "/proc/self", "m"))
    attack.nobody |= dice.random() < 0.3
    attack.flags += dice.choice(
        ([], ["--outputs", "o.jsonl"], ["--model-dir", "m"], ["--trace-ids", "t"])
    )
    attack.codes |= REFUSED


def _signal(attack: Attack, dice: Random) -> None:
    if dice.random() < 0.7:
        attack.flags += ["--rounds", "1000000", "--aggregate"]
    attack.interrupt(dice, dice.choice((2, 2, 15)))


def _script(attack: Attack, dice: Random) -> None:
    attack.script, attack.own = dice.choice(sorted(SCRIPTS)), True
    attack.env = {"HOME": "{here}", "PATH": "/usr/bin:/bin"}
    attack.codes |= {REJECTED} if attack.script == "dedup" else frozenset()
    _use_model(
        attack, dict(_mutator(dice.choice(MODEL_READERS)).mutant(dice.randrange(1 << 30))), "m"
    )
    if dice.random() < 0.3:
        _plant(attack, dice)
    source, target = SCRIPTS[attack.script]
    attack.flags = [source, "{here}/m"]
    if target:
        attack.flags += [target, dice.choice(("{here}/o", "/proc/x", "{here}/m/x"))]
    attack.made_of = ["script"]


Ingredient = Callable[[Attack, Random], None]
_INGREDIENTS: dict[Ingredient, int] = {
    _flag: 8,
    _variable: 8,
    _settings_file: 3,
    _config: 6,
    _model: 7,
    _plant: 5,
    _prompts: 5,
    _stream: 4,
    _limit: 5,
    _place: 3,
    _signal: 3,
    _cache_place: 1,
}
