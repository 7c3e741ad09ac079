"""How a model is named: paths, names of the Hub's cache, and what is said of everything else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import as_f32, write_gguf
from hub_cache import COMMIT, add_model
from huggingface_hub import constants
from weight_files import GPTOSS, LLAMA, array, copy_model, write_hf

import clocher_runtime
from clocher_kernels.errors import ClocherError, ModelNotFound, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import EMBEDDED, embedded_model, locate

PLAIN = {"w": array("F32", 2, 4)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub; the current directory is an empty one beside it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


def tiny_gguf(path: Path) -> Path:
    tiny = open_checkpoint(LLAMA)
    return write_gguf(path, tiny.config, as_f32(tiny))


def refused(name: str | Path) -> str:
    """Return the message for a name that is no model, from whoever looks at it first."""
    with pytest.raises(ClocherError) as caught:
        open_checkpoint(locate(name, "MODEL"))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


def test_what_is_there_is_taken_as_it_is(cache: Path) -> None:
    file = tiny_gguf(Path("tiny.gguf"))
    assert locate(LLAMA, "x") == LLAMA and locate(str(file), "x") == file
    assert locate(EMBEDDED, "x") == embedded_model()
    Path(EMBEDDED).mkdir()
    assert locate(EMBEDDED, "x") == Path(EMBEDDED)


def test_a_name_of_the_cache_is_its_snapshot(cache: Path) -> None:
    snapshot = add_model(cache, "own/tiny", LLAMA)
    older = add_model(cache, "own/tiny", LLAMA, "v1", "f" * 40)
    assert locate("own/tiny", "x") == snapshot == locate(f"own/tiny@{COMMIT}", "x")
    assert locate("own/tiny@v1", "x") == older
    assert open_checkpoint(locate("own/tiny", "x")).names == open_checkpoint(LLAMA).names
    with clocher_runtime.load("own/tiny", device="cpu", context=64) as model:
        assert model.generate("def ", max_new=2)
    shutil.copytree(LLAMA, "own/tiny")
    assert locate("own/tiny", "x") == Path("own/tiny")  # what is there comes first


def test_a_file_of_a_repository(cache: Path) -> None:
    file = tiny_gguf(Path("tiny-q4.gguf"))
    snapshot = add_model(cache, "own/gguf", file)
    assert locate("own/gguf/tiny-q4.gguf", "x") == snapshot / "tiny-q4.gguf"
    assert open_checkpoint(locate("own/gguf", "x")).kind == "gguf"
    assert "`clocher pull own/gguf --file other.gguf`" in refused("own/gguf/other.gguf")


def test_blobs_that_repositories_share_are_of_the_cache(cache: Path) -> None:
    snapshot = add_model(cache, "own/tiny", LLAMA)
    shared = cache / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob = Path(os.path.realpath(snapshot / "model.safetensors"))
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert open_checkpoint(snapshot).names == open_checkpoint(LLAMA).names
    outside = cache / "blobs" / "secret"
    shared.rename(outside)
    blob.unlink()
    blob.symlink_to(outside)
    assert "which is outside" in refused("own/tiny")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("", ["MODEL is empty; give the directory"]),
        ("own/absent", ["MODEL: 'own/absent' is not a directory", "`clocher pull own/absent`"]),
        ("own/tinny", ["`clocher pull own/tinny` fetches it", "did you mean own/tiny?"]),
        ("tiny", ["no model 'tiny' here", "did you mean own/tiny?"]),
        ("OWN/Tiny", ["did you mean own/tiny?"]),
        ("own/tiny@v9", ["not its revision v9 (it has main)", "`clocher pull own/tiny --rev"]),
        ("./modle", ["'./modle' does not exist", "did you mean model"]),
        ("under/modle", ["'under/modle' does not exist; did you mean under/model?"]),
        ("own/absent@v2", ["`clocher pull own/absent --revision v2` fetches it"]),
        ("llama3.2:1b", ["spelled as ollama and llama.cpp do", "`clocher pull OWNER/llama3.2`"]),
        ("https://huggingface.co/own/tiny", ["an address; `clocher pull own/tiny`"]),
        ("https://huggingface.co/own/tiny/tree/main", ["`clocher pull own/tiny`"]),
        ("hf.co/own/tiny", ["`clocher pull own/tiny`"]),
        ("~/m", ["the shell replaces ~", "give {home}/m"]),
        ("absent.gguf", ["'absent.gguf': no such file"]),
        ("../../etc", ["does not exist"]),
        ("own/..", ["does not exist"]),
        ("a\0b", ["no model 'a\\x00b' here"]),
        ("x" * 5000, ["no model 'xxx"]),
        ("own/tiny/x\x1b[31m.gguf", ["\\x1b"]),
    ],
    ids=lambda v: str(v)[:30],
)
def test_names_that_stand_for_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: list[str]
) -> None:
    add_model(cache, "own/tiny", LLAMA)
    copy_model(LLAMA, Path("model"))
    copy_model(LLAMA, Path("under/model"))
    home = tmp_path / "home"
    (home / "m").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    message = refused(name)
    for part in parts:
        assert part.format(home=home) in message


def lora(path: Path) -> Path:
    (path / "adapter_model.safetensors").write_bytes(b"")
    config = {"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "r": 8}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def lora_with_config(path: Path) -> Path:
    (path / "config.json").write_text("{}")
    return lora(path)


def hostile_lora(path: Path) -> Path:
    name = "x" * 900_000 + "\x1b[2J\n"
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    return path


def emptied(*names: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"{}" if name.endswith(".json") else b"xxxxxxxxxx")
        return path

    return make


def file_of(name: str, data: bytes = b"x" * 20) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        (path / name).write_bytes(data)
        return path / name

    return make


def pointer(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        copy_model(LLAMA, path / "m")
        (path / "m" / name).write_bytes(POINTER)
        return path / "m"

    return make


def missing_shard(path: Path) -> Path:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    write_hf(path, PLAIN)
    (path / "model.safetensors").rename(path / names[0])
    index = {"weight_map": {"w": names[0], "x": names[1]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def mlx(path: Path) -> Path:
    write_hf(path, PLAIN)
    (path / "config.json").write_text('{"quantization": {"group_size": 64, "bits": 4}}')
    return path


def models_below(path: Path) -> Path:
    for name in ("a", "b", "no"):
        (path / name).mkdir()
    shutil.copytree(LLAMA, path / "a" / "hf")
    (path / "b" / "x.gguf").write_bytes(b"GGUF")
    return path


def cache_itself(path: Path) -> Path:
    add_model(path, "own/tiny", LLAMA)
    return path


def folder_of_a_repository(path: Path) -> Path:
    add_model(path, "own/tiny", LLAMA)
    return path / "models--own--tiny"


def blob_that_is_gone(path: Path) -> Path:
    snapshot = add_model(path, "own/tiny", LLAMA)
    (snapshot / "model.safetensors").resolve().unlink()
    return snapshot


def unfinished_pull(path: Path) -> Path:
    snapshot = add_model(path, "own/tiny", LLAMA)
    (snapshot / "model.safetensors").unlink()
    return snapshot


def fifo(path: Path) -> Path:
    os.mkfifo(path / "pipe")
    return path / "pipe"


def changed_config(**fields: object) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        folder = copy_model(LLAMA, path / "m")
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def quantised(method: str | None = None, **settings: object) -> Callable[[Path], Path]:
    return changed_config(quantization_config={"quant_method": method, **settings})


FOREIGN_METHODS = {
    "torchao": "torchao weights",
    "hqq": "HQQ weights",
    "exl2": "EXL2 weights",
    "exl3": "EXL3 weights",
    "aqlm": "AQLM weights",
    "spqr": "SpQR weights",
    "vptq": "VPTQ weights",
    "quanto": "quanto weights",
}


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lora,
            [
                "a LoRA adapter of 'meta-llama/Llama-3.2-1B'",
                "clocher chat meta-llama/Llama-3.2-1B --lora ",
            ],
        ),
        (lora_with_config, ["a LoRA adapter of 'meta-llama/Llama-3.2-1B'"]),
        (hostile_lora, ["a LoRA adapter of 'xxx"]),
        (emptied("adapter_config.json"), ["a LoRA adapter of its base"]),
        (file_of("model.safetensors"), ["one file of weights; give its directory"]),
        (file_of("pytorch_model.bin"), ["pickled weights", "give the directory"]),
        (file_of("model.pt"), ["pickled weights"]),
        (file_of("model.ckpt"), ["pickled weights"]),
        (file_of("config.json"), ["one file of a model; give its directory"]),
        (file_of("notes.txt"), ["not a model; give the directory of a model"]),
        (file_of("sha256-00", b"GGUF\x03"), ["whose name does not say so", "ln -s"]),
        (file_of("empty.gguf", b""), ["0 bytes"]),
        (file_of("text.gguf"), ["no GGUF"]),
        (file_of("lfs.gguf", POINTER), ["a git-lfs pointer", "`git lfs pull`"]),
        (pointer("model.safetensors"), ["a git-lfs pointer", "`git lfs pull`"]),
        (pointer("config.json"), ["a git-lfs pointer"]),
        (blob_that_is_gone, ["a link to a file that is gone", "`clocher pull own/tiny` resumes"]),
        (emptied("model.safetensors"), ["but no config.json"]),
        (emptied("pytorch_model.bin"), ["but no config.json; pickled"]),
        (emptied("q4_manifest.planes.bin"), ["an unfinished conversion", "run the command that"]),
        (emptied("config.json"), ["neither model.safetensors nor", "`clocher pull OWNER/NAME"]),
        (emptied("config.json", "pytorch_model.bin"), ["only pickled weights", "clocher convert"]),
        (emptied("config.json", "other.safetensors"), ["but other.safetensors, whose names"]),
        (emptied("config.json", "model-00001-of-00003.safetensors"), ["2 of 3 shards are missing"]),
        (emptied("config.json", "tf_model.h5"), ["TensorFlow weights, not read here"]),
        (emptied("config.json", "flax_model.msgpack"), ["Flax weights"]),
        (emptied("onnx/model.onnx", "config.json"), ["an ONNX model"]),
        (emptied("model.onnx"), ["an ONNX model"]),
        (emptied("model_index.json"), ["a diffusers pipeline"]),
        (emptied("weights.npz", "config.json"), ["weights of an old MLX"]),
        (emptied("a.gguf", "b.gguf"), ["2 GGUF files (a.gguf, b.gguf); name one of them"]),
        (emptied("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), ["no GGUF"]),
        (emptied(), ["no model there", "the directory is empty"]),
        (emptied("notes.txt"), ["no model there; looked for model.ie.json, config.json"]),
        (mlx, ["MLX's own quantisation"]),
        (quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4"), ["bitsandbytes", "4 bits, nf4"]),
        (quantised("bitsandbytes", load_in_8bit=True), ["bitsandbytes weights of 8 bits"]),
        *[
            (quantised(method), [name, "not read here; take the float model"])
            for method, name in FOREIGN_METHODS.items()
        ],
        (changed_config(quip_params={"codebook": "E8P12"}), ["QuIP#"]),
        (quantised("surprise"), ["quant_method 'surprise' is not known; known: mxfp4, "]),
        (emptied("qmodel.pt", "config.json"), ["an HQQ model"]),
        (missing_shard, ["1 of 2 weight files are missing", "-00002-of-00002.safetensors"]),
        (models_below, ["no model, but 2 below it: ", "given/a, ", "given/b; give one"]),
        (cache_itself, ["a cache of the Hub; name a model of it: own/tiny"]),
        (folder_of_a_repository, ["the Hub's folder of own/tiny; give the name own/tiny"]),
        (unfinished_pull, ["`clocher pull own/tiny` resumes it"]),
        (fifo, ["not a regular file"]),
    ],
    ids=lambda v: getattr(v, "__qualname__", str(v[0])[:30] if isinstance(v, list) else str(v)),
)
def test_directories_and_files_that_are_no_model(
    cache: Path, tmp_path: Path, make: Callable[[Path], Path], parts: list[str]
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    message = refused(make(folder))
    for part in parts:
        assert part in message
    assert "\x1b" not in message


def test_a_family_that_is_not_known_names_those_that_are(cache: Path, tmp_path: Path) -> None:
    folder = copy_model(GPTOSS, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertModel"]
    (folder / "config.json").write_text(json.dumps(config))
    known = r"architecture 'BertModel' is not known; .* lists: BitNet, "
    with pytest.raises(ClocherError, match=known):
        clocher_runtime.load(folder, device="cpu")


def test_a_cache_that_lies_is_not_followed(cache: Path, tmp_path: Path) -> None:
    snapshot = add_model(cache, "own/tiny", LLAMA)
    ref = cache / "models--own--tiny" / "refs" / "main"
    for content in (b"../../../x", b"\xff" * 40, b"", COMMIT.encode() * 9):
        ref.write_bytes(content)
        with pytest.raises(ModelNotFound):
            locate("own/tiny", "x")
    ref.write_bytes(COMMIT.encode() + b"\n")
    assert locate("own/tiny", "x") == snapshot
    with pytest.raises(UsageError):
        locate("  ", "x")


def test_the_python_api_takes_names_of_the_cache(cache: Path) -> None:
    add_model(cache, "own/tiny", LLAMA)
    with clocher_runtime.load("own/tiny", device="cpu", threads=2) as model:
        by_name = model.generate("def f(x):", max_new=8)
    with clocher_runtime.load(LLAMA, device="cpu", threads=2) as model:
        assert model.generate("def f(x):", max_new=8) == by_name
    assert clocher_runtime.generate("def f(x):", "own/tiny", max_new=8) == by_name
    with pytest.raises(ModelNotFound, match="`clocher pull own/other` fetches it"):
        clocher_runtime.load("own/other")
    with pytest.raises(ModelNotFound, match=r"^lora: 'own/other' .*`clocher pull own/other`"):
        clocher_runtime.load("own/tiny", lora="own/other")


def test_a_family_that_is_not_known_is_named_before_its_other_tensors(tmp_path: Path) -> None:
    """GPT-2 stores the masks of its attention, bool or u8, beside the weights."""
    arrays = {"transformer.wte.weight": array("F32", 6, 64)}
    for dtype in ("BOOL", "U8"):
        arrays["transformer.h.0.attn.bias"] = array(dtype, 1, 1, 4, 4)
        folder = write_hf(tmp_path / dtype, arrays, {"architectures": ["GPT2LMHeadModel"]})
        assert "architecture 'GPT2LMHeadModel' is not known" in refused(folder)
    arrays = {"model.norm.weight": array("U8", 4)}
    folder = write_hf(tmp_path / "known", arrays, {"architectures": ["LlamaForCausalLM"]})
    assert "dtype U8 has no meaning here" in refused(folder)
