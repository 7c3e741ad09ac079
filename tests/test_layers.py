"""The structure of the source: layers, late imports, banned calls, sizes, names, start-up."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("clocher_kernels", "cpu_fallback", "clocher_runtime")
OUTSIDE = ("scripts", "bench", "tests")
MAX_LINES = 450

# The rooms of the house, from the ground up. A module stands in the room that its name begins with;
# imports go to its own line or to one above. So folders have no cycle either.
ROOMS = (
    """
clocher_kernels.errors clocher_kernels.guards clocher_kernels.dtypes clocher_kernels.formats \\
    clocher_kernels.quant_tensor
clocher_kernels.plan clocher_kernels.ops
clocher_kernels.cuda
cpu_fallback.lanes
cpu_fallback.team
cpu_fallback.tiles
cpu_fallback.ops
cpu_fallback.executor
clocher_kernels.library
clocher_kernels.torch
clocher_runtime.exit_codes
clocher_runtime.disk
clocher_runtime.models
clocher_runtime.checkpoints
clocher_runtime.speculation clocher_runtime.diffusion
clocher_runtime.config
clocher_runtime.engine
clocher_runtime.text
clocher_runtime.convert
clocher_runtime.quality
clocher_runtime.quantize
clocher_runtime.command
clocher_runtime.serve
clocher_runtime.api
clocher_runtime.ray
clocher_runtime.subcommands
clocher_runtime.cli clocher_runtime.monitoring
clocher_runtime.__main__ clocher_runtime.adapters
bench.record bench.machine bench.cells bench.ops
bench.experiment
bench.gpu
bench
""".replace("\\\n", "")
    .strip()
    .splitlines()
)
FLAT = {"clocher_runtime": 5, "cpu_fallback": 2, "clocher_kernels": 5}
"""Modules that may stand in a package's own folder: doors, and what every room needs."""
# What a package may import besides the standard library and itself and those below.
LIBRARIES: dict[str, str] = {
    "clocher_kernels": "numpy",
    "clocher_kernels.cuda": "numpy torch triton cupy pynvml",
    "clocher_kernels.torch": "numpy torch",
    "cpu_fallback": "numpy numba llvmlite",
    "clocher_runtime": "numpy msgspec tokenizers jinja2 click rich huggingface_hub re2",
    "clocher_runtime.convert.to_compressed": "numpy torch safetensors compressed_tensors",
    "clocher_runtime.checkpoints.hf.torch_bin": "numpy torch",
    "clocher_runtime.command.verify_hf": "numpy click torch transformers",
    "clocher_runtime.monitoring": "click msgspec prometheus_client",
    "clocher_runtime.ray": "numpy ray starlette",
    "clocher_runtime.serve": """numpy msgspec click starlette uvicorn h11 pydantic llguidance
        prometheus_client""",
    "clocher_runtime.text.grammar": "numpy msgspec llguidance",
    "clocher_runtime.adapters.lm_eval_model": "numpy lm_eval tqdm",
    "clocher_runtime.adapters.transformers_quantizer": "torch transformers",
    "scripts": "numpy click rich",
    "bench": """numpy msgspec click rich jinja2 jsonschema pytest torch triton cupy
        gemlite torchao bitsandbytes openvino openvino_genai""",
}
# Distributions whose modules have another name.
PROVIDED_BY = {
    "cupy-cuda12x": "cupy",
    "nvidia-ml-py": "pynvml",
    "openvino-genai": "openvino_genai",
    "google-re2": "re2",
    "compressed-tensors": "compressed_tensors",
    "prometheus-client": "prometheus_client",
}
BACK_ENDS = ("cpu_fallback", "clocher_kernels.cuda")
HEAVY = ("torch", "triton", "cupy", "numba", "llvmlite", "transformers", "safetensors")

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib", "runpy"}
BANNED_NAMES = {"eval", "exec", "compile", "__import__", "breakpoint"}
BANNED_ATTRIBUTES = {
    "torch": {"load"},
    "yaml": {"load", "load_all", "unsafe_load", "full_load"},
    "importlib": {"import_module", "util", "machinery"},
    "os": {"system", "popen"},
    "np": {"load", "fromfile"},
    "numpy": {"load", "fromfile"},
}
BANNED_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}
BANNED_STEMS = {"utils", "util", "helpers", "helper", "common", "misc"}
HALF_DONE = re.compile(
    r"TODO|FIXME|\bXXX\b|NotImplementedError|xfail|pytest\.skip|# type: ignore(?!\[)|# noqa(?!:)"
)
# Split, so that this file does not name them.
MACHINE_PATHS = re.compile("/(?:work|root|home/[a-z]+|Users/[A-Za-z]+|tmp/[a-z]+)/")


class Import(NamedTuple):
    """One import statement: what it names, its line, whether it runs with the module."""

    target: str
    line: int
    eager: bool


class Module(NamedTuple):
    """A parsed source file."""

    name: str
    path: Path
    tree: ast.Module


def source_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8")))


@cache
def modules() -> dict[str, Module]:
    """Return all modules but those of tests, by name; importing this file parses nothing."""
    return {m.name: m for m in map(parse, source_files(*PACKAGES, "scripts", "bench"))}


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return every import; `from package import name` names the module if `name` is one."""
    module = parse(path)

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue  # which holds no statement
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, eager)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module.name}:{child.lineno}: relative import"
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    target = inner if inner in modules() else str(child.module)
                    yield Import(target, child.lineno, eager)
            else:
                late = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                late = late or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                )
                yield from walk(child, eager and not late)

    return tuple(walk(module.tree, True))


def layer_of(name: str) -> int | None:
    """Return the line of ROOMS that a module is on; the packages themselves are the ground."""
    if name in PACKAGES:
        return 0
    if name.startswith("scripts."):
        return len(ROOMS)
    for layer, rooms in enumerate(ROOMS):
        if any(name == room or name.startswith(f"{room}.") for room in rooms.split()):
            return layer
    return None


def back_end_of(name: str) -> str | None:
    return next((b for b in BACK_ENDS if name == b or name.startswith(f"{b}.")), None)


def complain(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_every_module_has_a_room() -> None:
    complain([f"{name}: no room in ROOMS" for name in modules() if layer_of(name) is None])


def test_the_table_names_no_room_that_is_gone() -> None:
    rooms = [room for line in ROOMS for room in line.split()]
    complain([f"{room}: no such room" for room in rooms if room not in modules()])


@pytest.mark.parametrize("package", FLAT)
def test_few_modules_stand_in_the_hall(package: str) -> None:
    flat = [p.stem for p in (ROOT / package).glob("*.py") if p.stem != "__init__"]
    assert len(flat) <= FLAT[package], flat


def test_imports_go_down() -> None:
    faults = []
    for module in modules().values():
        own = layer_of(module.name)
        for target, line, eager in imports(module.path):
            layer = layer_of(target)
            facade = module.name == target.split(".")[0] and not eager
            if layer is not None and own is not None and layer > own and not facade:
                faults.append(f"{module.name}:{line}: imports {target}, which stands above it")
    complain(faults)


def test_imports_have_no_cycle() -> None:
    graph = {
        m.name: {i.target for i in imports(m.path) if i.eager and i.target in modules()} - {m.name}
        for m in modules().values()
    }
    tuple(TopologicalSorter(graph).static_order())


def test_back_ends_do_not_know_each_other() -> None:
    faults = []
    for module in modules().values():
        own = back_end_of(module.name)
        for target, line, _ in imports(module.path):
            if own and back_end_of(target) not in (None, own):
                faults.append(f"{module.name}:{line}: imports {target}")
    complain(faults)


def test_the_runtime_reaches_back_ends_late_and_in_one_place() -> None:
    faults = []
    for module in modules().values():
        if not module.name.startswith("clocher_runtime"):
            continue
        for target, line, eager in imports(module.path):
            if back_end_of(target) and (eager or module.name != "clocher_runtime.engine.backends"):
                faults.append(f"{module.name}:{line}: imports {target}")
    complain(faults)


def test_nobody_imports_the_outside() -> None:
    """Only tests reach into bench: they test it."""
    faults, names = [], rf"^\s*(from|import)\s+({'|'.join(OUTSIDE)})\b"
    for path in source_files(*PACKAGES, *OUTSIDE):
        here = path.relative_to(ROOT).parts[0]
        if not re.search(names, path.read_text(encoding="utf-8"), re.M):
            continue
        for target, line, _ in imports(path):
            there = target.split(".")[0]
            if there in OUTSIDE and there != here and (here, there) != ("tests", "bench"):
                faults.append(f"{path}:{line}: imports {target}")
    complain(faults)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_only_the_timed_window_reads_the_clock() -> None:
    library = [m for m in modules().values() if m.name.split(".")[0] in PACKAGES]
    readers = [m.name for m in library if any(i.target == "time" for i in imports(m.path))]
    assert readers == ["clocher_runtime.engine.timing"]


def test_only_declared_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    core = names_of(project["dependencies"])
    faults = []
    for module in modules().values():
        top_package = module.name.split(".")[0]
        package = next(p for p in sorted(LIBRARIES, reverse=True) if module.name.startswith(p))
        extra = {
            "bench": ("bench", "peers", "peers-cuda", "test", "cuda"),
            "clocher_kernels.cuda": ("cuda",),
            "clocher_kernels.torch": ("torch",),
            "clocher_runtime.checkpoints.hf.torch_bin": ("torch",),
            "clocher_runtime.convert.to_compressed": ("compressed",),
            "clocher_runtime.quality.evaluate": ("bench",),
            "clocher_runtime.command.verify_hf": ("test",),
            "clocher_runtime.monitoring": ("monitoring",),
            "clocher_runtime.ray": ("ray", "serve"),
            "clocher_runtime.serve": ("serve",),
            "clocher_runtime.text.grammar": ("serve",),
            "clocher_runtime.adapters.lm_eval_model": ("eval",),
            "clocher_runtime.adapters.transformers_quantizer": ("transformers",),
        }.get(package, ())
        declared = core.union(*(names_of(extras[name]) for name in extra))
        allowed = {PROVIDED_BY.get(n, n) for n in declared} & set(LIBRARIES[package].split())
        for target, line, _ in imports(module.path):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES or top == top_package:
                continue
            if top not in allowed:
                faults.append(f"{module.name}:{line}: imports {top}")
    complain(faults)


def banned(node: ast.AST) -> str | None:
    """Return what a node does that could execute a file's contents, None if nothing."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        found = [n for n in names if n.split(".")[0] in BANNED_MODULES]
        if isinstance(node, ast.ImportFrom):
            banned_here = BANNED_ATTRIBUTES.get(str(node.module), set())
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in banned_here]
        return ", ".join(found) or None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.attr in BANNED_ATTRIBUTES.get(node.value.id, set()):
            return f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
        return node.id
    elif isinstance(node, ast.keyword) and node.arg in BANNED_KEYWORDS:
        refused = isinstance(node.value, ast.Constant) and node.value.value is False
        return None if refused else f"{node.arg}="
    return None


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a module without calls of torch's restricted unpickler."""
    restricted = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and "weights_only=True" in [ast.unparse(keyword) for keyword in node.keywords]
    }
    return [node for node in ast.walk(tree) if id(node) not in restricted]


def test_no_file_becomes_code() -> None:
    faults = []
    for module in modules().values():
        for node in nodes_of(module.tree):
            what = banned(node)
            if what:
                faults.append(f"{module.name}:{getattr(node, 'lineno', '?')}: {what}")
    complain(faults)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(p)",
        "torch.load(p, weights_only=False)",
        "from torch import load",
        "eval('1')",
        "exec(text)",
        "yaml.load(text)",
        "np.load(p, allow_pickle=True)",
        "f(trust_remote_code=True)",
        "importlib.import_module(name)",
        "subprocess.run(c, shell=True)",
    ],
)
def test_the_gate_itself(line: str) -> None:
    assert any(banned(node) for node in nodes_of(ast.parse(line)))


def test_modules_are_short() -> None:
    lengths = {m.path: len(m.path.read_text().splitlines()) for m in modules().values()}
    complain([f"{path}: {n} lines" for path, n in lengths.items() if n > MAX_LINES])


def test_names_say_what_is_inside() -> None:
    paths = [*source_files(*PACKAGES, *OUTSIDE)]
    complain([str(p) for p in paths if {p.stem, p.parent.name} & BANNED_STEMS])


def test_nothing_is_half_done() -> None:
    faults = []
    for path in source_files(*PACKAGES, *OUTSIDE):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if HALF_DONE.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    complain(faults)


def test_no_path_of_somebodys_machine() -> None:
    folders = (*PACKAGES, *OUTSIDE, "docs", ".ci")
    suffixes = {".py", ".md", ".toml", ".txt", ".json", ".sh", ""}
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
    paths += [p for p in ROOT.iterdir() if not p.name.endswith(".lock")]
    data = ROOT / "tests" / "data"
    faults = []
    for path in paths:
        if not path.is_file() or path.suffix not in suffixes or data in path.parents:
            continue
        for found in MACHINE_PATHS.findall(path.read_text(encoding="utf-8")):
            faults.append(f"{path.relative_to(ROOT)}: {found}")
    complain(faults)


def loaded_by(code: str) -> set[str]:
    """Return the heavy modules that a fresh interpreter has loaded after running some code."""
    probe = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import clocher_runtime, clocher_kernels.ops",
        "import clocher_runtime.cli, clocher_runtime.command.run, clocher_runtime.api",
        "import clocher_runtime.convert.to_iebin",
    ],
)
def test_import_loads_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


def test_a_cpu_run_loads_no_torch() -> None:
    code = "import clocher_runtime\nwith clocher_runtime.load() as m: m.generate('import ', 2)"
    assert loaded_by(code) <= {"numba", "llvmlite"}
    assert loaded_by(code) == {"llvmlite"}  # kernels are in the cache now
