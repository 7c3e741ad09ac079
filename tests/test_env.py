"""The table of settings: what each flag and variable takes, who wins, and what is ignored aloud."""

import dataclasses
from pathlib import Path

import pytest

from clocher_kernels.errors import UsageError
from clocher_runtime.config.commands import ALL, SETTINGS, RunConfig, resolve, warnings
from clocher_runtime.config.engine import HINTS

ROOT = Path(__file__).parent.parent

# What the original documents name for the program, with a value that each takes and one that it
# refuses; a flag has a variable of its own name.
SEED_VARIABLES = {
    "CLOCHER_THREADS": ("12", "all"),
    "CLOCHER_BATCH": ("4", "0"),
    "CLOCHER_PROMPTS_FILE": ("prompts_10..txt", None),
    "CLOCHER_ROUNDS": ("3", "-1"),
    "CLOCHER_MODEL_DIR": ("models/gpt-oss-20b", None),
    "CLOCHER_MAX_NEW": ("128", "1e3"),
    "CLOCHER_WARMUP": ("0", "x"),
    "CLOCHER_PREFETCH": ("256", "maybe"),
    "CLOCHER_PRETRANSPOSE": ("all", "yes"),
    "IE_PRECISION": ("int4w", "int5"),
    "PRECISION": ("fp32", "double"),
    "IE_ACT_PREC": ("fp8", "e4m3"),
    "IE_REQUIRE_MODEL": ("1", "true"),
    "IE_BYTES_PER_TOKEN": ("64000000", "64M"),
    "IE_STRIDE_BYTES": ("256", "0"),
    "IE_VERIFY_TOUCH": ("1", "2"),
    "AFFINITY": ("compact", "tight"),
    "IE_TP_USE_AFFINITY": ("1", "yes"),
    "NUMA_POLICY": ("socket:1", "socket:x"),
    "IE_HOT_REPLICATE": ("1", "on"),
    "IE_HOT_REPL_LIMIT_MB": ("512", "-1"),
    "IE_DEDUP": ("1", "y"),
    "IE_DEDUP_STRICT": ("1", "y"),
    "IE_DEDUP_POLICY": ("cache", "always"),
    "IE_DEDUP_CACHE_MB": ("64", "1.5"),
    "IE_DEDUP_HOT_BYTES": ("1024", "1k"),
    "IE_DEDUP_HOT_LIST": ("a,b", None),
    "IE_PREFETCH_DISTANCE": ("auto", "far"),
    "IE_NT_LOADS": ("1", "2"),
    "IE_NT_RATIO": ("50", "101"),
    "IE_NT_THRESHOLD_RATIO": ("1.5", "nan"),
    "IE_L3_BYTES": ("1000000", "1_000"),
    "IE_STREAM_BLOCK_BYTES": ("4096", "4 KiB"),
    "IE_REUSE_GUARD_WINDOWS": ("2", "two"),
    "CLOCHER_ISA": ("avx2", "sse2"),
}
SEED_FLAGS = [
    "--device",
    "--model-dir",
    "--model-json",
    "--model-bin",
    "--yes",
    "--pretranspose",
    "--prefetch",
    "--warmup",
    "--rounds",
    "--prompts-file",
    "--aggregate",
    "--json",
    "--outputs",
    "--trace-ids",
    "--trace-topk",
    "--threads",
    "--precision",
    "--batch",
    "--max-new",
    "--prompt",
    "--prompt-ids",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--generation-config",
    "--seed",
    "--ignore-eos",
    "--stub",
    "--verify-weights",
    "--fast-batch",
    "--kv-dtype",
    "--context",
    "--config",
    "--lora",
    "--speculate",
    "--act-prec",
    "--act-sparsity",
    "--act-calibration",
    "--draft-model",
    "--attn",
    "--diffusion",
]


def doc_row(name: str) -> str:
    """Return the row of docs/cli.md that describes a setting."""
    setting = ALL[name]
    default = RunConfig.__dataclass_fields__[name].default if name in SETTINGS else None
    shown = f"{default:g}" if isinstance(default, float) else f"{default}"
    if default is None or default is False:
        shown = ""
    takes = "no value" if setting.flag and setting.takes.metavar == "0|1" else setting.takes.takes
    flag = f"`{setting.flag}`" if setting.flag else ""
    variables = ", ".join(f"`{v}`" for v in setting.env)
    return f"| {flag} | {variables} | {takes} | {shown} | {setting.help} |"


def test_every_variable_and_flag_of_the_original_documents_is_in_the_table():
    own = {f"CLOCHER_{flag[2:].replace('-', '_').upper()}" for flag in SEED_FLAGS}
    assert {v for s in ALL.values() for v in s.env} == set(SEED_VARIABLES) | own
    assert {s.flag for s in ALL.values() if s.flag} == set(SEED_FLAGS)


def test_the_table_describes_exactly_the_fields_of_the_config():
    fields = {f.name for f in dataclasses.fields(RunConfig)}
    assert fields >= set(SETTINGS) | {"given", "hints_ignored"}
    assert not set(SETTINGS) & set(HINTS)


def test_a_misspelt_variable_is_told_with_the_nearest_name() -> None:
    found = {"CLOCHER_MAXNEW": "3", "CLOCHER_MAX_NEW": "4", "CLOCHER_PORT": "5"}
    told = warnings(resolve({}, found), found)
    assert told == [
        "CLOCHER_MAXNEW: no such variable, it is ignored; the nearest is CLOCHER_MAX_NEW"
    ]


@pytest.mark.parametrize("variable", SEED_VARIABLES)
def test_variable_is_parsed_strictly(variable):
    good, bad = SEED_VARIABLES[variable]
    resolve({}, {variable: good})
    if bad is not None:
        with pytest.raises(UsageError) as error:
            resolve({}, {variable: bad})
        message = str(error.value)
        name = next(n for n, s in ALL.items() if variable in s.env)
        assert message == f"{variable}: got {bad!r}, expected {ALL[name].takes.takes}"


@pytest.mark.parametrize("flag", SEED_FLAGS)
def test_flag_error_names_the_flag(flag):
    name = next(n for n, s in ALL.items() if s.flag == flag)
    bad = {"--prompt": "\udcff", "--model-dir": "", "--model-json": "", "--model-bin": ""}
    bad["--prompts-file"] = bad["--config"] = bad["--outputs"] = bad["--trace-ids"] = ""
    bad["--lora"] = bad["--draft-model"] = bad["--act-calibration"] = ""
    bad["--act-sparsity"] = "\udcff"
    with pytest.raises(UsageError, match=f"^{flag}: got "):
        resolve({name: bad.get(flag, "?")}, {})


@pytest.mark.parametrize(
    ("flags", "environ", "field", "expected"),
    [
        ({}, {}, "max_new", 64),
        ({}, {"CLOCHER_MAX_NEW": "7"}, "max_new", 7),
        ({"max_new": "9"}, {"CLOCHER_MAX_NEW": "7"}, "max_new", 9),
        ({"threads": "4"}, {"CLOCHER_THREADS": "all"}, "threads", 4),
        ({}, {"CLOCHER_THREADS": ""}, "threads", None),
        ({}, {"CLOCHER_MODEL_DIR": "a b"}, "model_dir", Path("a b")),
        ({"prompt_ids": "1, 2,3"}, {}, "prompt_ids", (1, 2, 3)),
        ({"temperature": ".7"}, {}, "temperature", 0.7),
        ({"seed": str(2**64 - 1)}, {}, "seed", 2**64 - 1),
        ({"stub": "1"}, {}, "stub", True),
    ],
    ids=lambda value: str(value),
)
def test_flag_beats_variable_beats_default(flags, environ, field, expected):
    assert getattr(resolve(flags, environ), field) == expected


@pytest.mark.parametrize(
    ("flags", "environ", "precision", "ignored"),
    [
        ({}, {"PRECISION": "bf16"}, "bf16", ()),
        ({}, {"PRECISION": "int4"}, "int4", ()),
        ({}, {"IE_PRECISION": "int4w", "PRECISION": "fp32"}, "int4w", ()),
        ({}, {"IE_PRECISION": "int4w", "PRECISION": "int4w"}, "int4w", ()),
        ({}, {"IE_PRECISION": "int4w", "PRECISION": "bf16"}, "int4w", ("PRECISION=bf16",)),
        ({}, {"IE_PRECISION": "fp16", "PRECISION": "int8w"}, "fp16", ("PRECISION=int8w",)),
        ({"precision": "int8w"}, {"IE_PRECISION": "int4w", "PRECISION": "bf16"}, "int8w", ()),
    ],
    ids=lambda value: str(value),
)
def test_weight_label_wins_over_the_float_hint(flags, environ, precision, ignored):
    config = resolve(flags, environ)
    assert config.precision == precision
    assert config.hints_ignored == ignored


@pytest.mark.parametrize("name", HINTS)
def test_hint_is_listed_unless_it_asks_for_what_happens_anyway(name):
    variable = HINTS[name].env[0]
    value = SEED_VARIABLES[variable][0]
    listed = () if value in HINTS[name].idle else (f"{variable}={value}",)
    assert resolve({}, {variable: value}).hints_ignored == listed
    for idle in HINTS[name].idle:
        assert resolve({}, {variable: idle}).hints_ignored == ()


def test_two_prompt_flags_exclude_each_other():
    with pytest.raises(UsageError, match="--prompt and --prompt-ids exclude each other"):
        resolve({"prompt": "a", "prompt_ids": "1"}, {})


def test_prompt_flag_beats_the_prompts_variable():
    config = resolve({"prompt": "a"}, {"CLOCHER_PROMPTS_FILE": "file.txt"})
    assert config.prompt == "a"
    assert config.prompts_file is None
    assert "prompts_file" not in config.given


@pytest.fixture
def config_file(tmp_path):
    """Write a settings file and return its path as a flag."""

    def write(text):
        path = tmp_path / "engine.toml"
        path.write_text(text, encoding="utf-8")
        return {"config": str(path)}

    return write


def test_file_is_weaker_than_flag_and_variable(config_file):
    flags = config_file("max_new = 5\nthreads = 3\nbatch = 2\n")
    config = resolve({**flags, "max_new": "7"}, {"CLOCHER_THREADS": "4"})
    assert (config.max_new, config.threads, config.batch) == (7, 4, 2)
    assert config.hints_ignored == ()
    assert config.given["batch"].source == f"{flags['config']}: batch"


def test_file_takes_the_types_of_toml(config_file):
    flags = config_file("ignore_eos = true\ntemperature = 0.5\nprompt_ids = [1, 2]\nnt_loads = 1\n")
    config = resolve(flags, {})
    assert (config.ignore_eos, config.temperature, config.prompt_ids) == (True, 0.5, (1, 2))
    assert config.hints_ignored == (f"{flags['config']}: nt_loads=1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread = 3\n", "unknown setting 'thread'; known are act_calibration, act_prec"),
        ("threads = 0\n", "threads: got '0', expected an integer from 1 to 1024"),
        ("threads = 1.5\n", "threads: got '1.5', expected"),
        ("[run]\nthreads = 1\n", "unknown setting 'run'"),
        ("threads = 2026-01-01\n", "threads: got a date"),
        ("threads =\n", "not TOML"),
        ("config = 'other.toml'\n", "unknown setting 'config'"),
        ("prompt = 'a'\nprompt_ids = [1]\n", "exclude each other"),
    ],
    ids=["key", "value", "float", "table", "date", "syntax", "nested", "excluded"],
)
def test_bad_file_says_what_is_wrong(config_file, text, message):
    with pytest.raises(UsageError, match=message):
        resolve(config_file(text), {})


def test_file_that_is_not_there():
    with pytest.raises(UsageError, match=r"none.toml: No such file"):
        resolve({"config": "none.toml"}, {})


def test_prompts_variable_beats_a_prompt_of_the_file(config_file):
    config = resolve(config_file("prompt = 'a'\n"), {"CLOCHER_PROMPTS_FILE": "file.txt"})
    assert (config.prompt, config.prompts_file) == (None, Path("file.txt"))


def test_stub_contradicts_a_model():
    with pytest.raises(UsageError, match="--stub and --model-dir"):
        resolve({"stub": "1", "model_dir": "x"}, {})
    with pytest.raises(UsageError, match="IE_REQUIRE_MODEL"):
        resolve({"stub": "1"}, {"IE_REQUIRE_MODEL": "1"})
    assert resolve({"stub": "1"}, {"CLOCHER_MODEL_DIR": "x"}).model_dir is None


def test_given_tells_where_a_value_came_from():
    config = resolve({"threads": "2"}, {"CLOCHER_THREADS": "3", "IE_ACT_PREC": "fp8"})
    assert {name: str(given) for name, given in config.given.items()} == {
        "threads": "--threads=2",
        "act_prec": "IE_ACT_PREC=fp8",
    }


def test_long_value_is_cut_in_the_message():
    with pytest.raises(UsageError) as error:
        resolve({}, {"CLOCHER_THREADS": "9" * 5000})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ALL)
def test_the_document_has_the_row_of_every_setting(name):
    lines = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").splitlines()
    assert doc_row(name) in lines


def test_the_file_of_settings_may_be_named_by_its_variable(config_file):
    path = config_file("max_new = 7\n")["config"]
    assert resolve({}, {"CLOCHER_CONFIG": path}).max_new == 7
    assert resolve({"max_new": "9"}, {"CLOCHER_CONFIG": path}).max_new == 9
    assert resolve({}, {"CLOCHER_CONFIG": ""}).max_new == 64
    with pytest.raises(UsageError, match=r"no\.toml: No such file"):
        resolve({}, {"CLOCHER_CONFIG": "no.toml"})
