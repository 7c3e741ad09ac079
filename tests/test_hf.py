"""Hugging Face directories: logical tensors, shards, links, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_files import (
    BITNET,
    GPTOSS,
    LLAMA,
    ROOT,
    TINY,
    Array,
    array,
    copy_model,
    read_with_the_library,
    write_hf,
    write_index,
    write_safetensors,
    write_sharded,
)

from clocher_kernels.errors import (
    FormatError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints import checkpoint as base

EXPERTS: dict[str, Array] = {
    "e_blocks": array("U8", 2, 3, 4, 16),
    "e_scales": array("U8", 2, 3, 4, fill=120),
    "e_bias": array("BF16", 2, 3),
}
TERNARY: dict[str, Array] = {
    "p.weight": array("U8", 2, 5, fill=0x24),
    "p.weight_scale": array("BF16", 1),
    "n.weight": array("BF16", 5),
}
FP8: dict[str, Array] = {
    "p.weight": array("F8_E4M3", 130, 129),
    "p.weight_scale_inv": array("F32", 2, 2),
}
PLAIN: dict[str, Array] = {"w": array("BF16", 2, 3), "v": array("F16", 3), "s": array("F32", 1)}


def config(method: str, **settings: object) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


def formats(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: tensor.format.name for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize("model", TINY, ids=lambda path: path.name)
def test_every_stored_byte_is_in_exactly_one_logical_tensor(model: Path) -> None:
    checkpoint = open_checkpoint(model, verify=True)
    stored = read_with_the_library(model / "model.safetensors")
    planes = {
        "blocks": lambda name: name + "_blocks",
        "scales": lambda name: name + "_scales",
        "scale": lambda name: name + "_scale",
    }
    seen = set()
    for name in checkpoint.names:
        for key, plane in checkpoint.tensor(name).planes.items():
            source = planes.get(key, str)(name)
            seen.add(source)
            assert plane.tobytes() == bytes(stored[source]["data"])
    assert seen == set(stored)


def test_tiny_checkpoints_have_the_formats_and_shapes_of_their_families() -> None:
    gptoss = open_checkpoint(GPTOSS)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert gptoss.shape(experts) == (8, 512, 256)
    assert formats(gptoss)[experts] == "mxfp4"
    assert sorted(set(formats(gptoss).values())) == ["bf16", "mxfp4"]
    bitnet = open_checkpoint(BITNET)
    assert bitnet.shape("model.layers.5.mlp.down_proj.weight") == (256, 768)
    assert sorted(set(formats(bitnet).values())) == ["bf16", "ternary"]
    llama = open_checkpoint(LLAMA)
    assert set(formats(llama).values()) == {"bf16"}
    assert llama.kind == "hf" and llama.config["model_type"] == "llama"
    assert llama.generation_config["eos_token_id"] == 0
    assert llama.tokenizer_json.read_bytes().startswith(b"{")
    assert [file.path for file in llama.files] == [LLAMA / "model.safetensors"]
    assert llama.nbytes == sum(tensor.nbytes for tensor in llama.tensors.values())


@pytest.mark.parametrize("folder", ["hf", "hf/original", "original"])
def test_a_model_in_a_subfolder_is_found(folder: str, tmp_path: Path) -> None:
    write_hf(tmp_path / folder, PLAIN)
    assert open_checkpoint(tmp_path).path == tmp_path / folder


def test_no_model_says_what_was_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelNotFound, match=r"model\.ie\.json, config\.json, hf/config\.json"):
            open_checkpoint(path)
    write_hf(tmp_path, PLAIN)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    write_hf(tmp_path, PLAIN)
    pickled = tmp_path / "pytorch_model-00001-of-00002.bin"
    (tmp_path / "model.safetensors").rename(pickled)
    with pytest.raises(UnsupportedModel, match=r"only pickled.*restricted.*safetensors"):
        open_checkpoint(tmp_path)


def test_an_unknown_tensor_is_named_with_some_that_exist(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, PLAIN))
    for look_up in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(ModelError, match=r"no tensor 'x'; it has 3 tensors, such as w, v, s"):
            look_up("x")


def test_tensors_at_odd_offsets_are_aligned_by_a_copy(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {"b": array("BF16", 1), "f": array("F32", 3), "w": array("BF16", 4)}
    header_length = 0
    for pad in range(4):
        write_hf(tmp_path, {"x" * (pad + 1): array("BF16", 1), **arrays})
        checkpoint = open_checkpoint(tmp_path)
        header_length += checkpoint.tensors["f"].planes["data"].ctypes.data % 4 != 0
        plane = checkpoint.tensor("f").planes["data"]
        assert plane.flags.aligned and plane.tobytes() == arrays["f"][2]
    assert header_length, "no case was unaligned"


def test_the_chat_template_file_wins(tmp_path: Path) -> None:
    write_hf(tmp_path, PLAIN)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert open_checkpoint(tmp_path).tokenizer_config == {"chat_template": "old"}
    (tmp_path / "chat_template.jinja").write_text("new")
    assert open_checkpoint(tmp_path).tokenizer_config == {"chat_template": "new"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="not UTF-8"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "7"])
def test_bad_settings_are_refused(name: str, text: str, tmp_path: Path) -> None:
    write_hf(tmp_path, PLAIN)
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=name):
        open_checkpoint(tmp_path)


# Shards.

A, B = "model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors"
SHARDS: dict[str, dict[str, Array]] = {A: EXPERTS, B: PLAIN}


def test_shards_are_one_model(tmp_path: Path) -> None:
    """Pairs of a packed tensor may lie in different shards."""
    scales = {"e_scales": EXPERTS["e_scales"]}
    rest = {name: stored for name, stored in EXPERTS.items() if name != "e_scales"}
    write_sharded(tmp_path / "sharded", {A: PLAIN | scales, B: rest})
    (tmp_path / "sharded" / "config.json").write_text(json.dumps(config("mxfp4")))
    (tmp_path / "sharded" / "stray.safetensors").write_bytes(b"not looked at")
    sharded = open_checkpoint(tmp_path / "sharded", verify=True)
    single = open_checkpoint(write_hf(tmp_path / "single", PLAIN | EXPERTS, config("mxfp4")))
    assert [file.path.name for file in sharded.files] == [A, B]
    assert formats(sharded) == formats(single)
    for name in single.names:
        for key, plane in single.tensors[name].planes.items():
            assert sharded.tensors[name].planes[key].tobytes() == plane.tobytes()


def test_shards_written_by_the_safetensors_library_are_read(tmp_path: Path) -> None:
    values = {name: np.arange(6, dtype=name).reshape(2, 3) for name in ("float32", "float16")}
    write_sharded(tmp_path, {})
    write_index(tmp_path, {"float32": A, "float16": B})
    for shard, name in ((A, "float32"), (B, "float16")):
        save_file({name: values[name]}, tmp_path / shard, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path, verify=True)
    for name, value in values.items():
        assert np.array_equal(checkpoint.tensor(name).decode(), value)


BAD_SHARD_NAMES = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "sub/model.safetensors",
    "..\\model.safetensors",
    "..",
    ".",
    "",
    ".hidden.safetensors",
    "a\x00.safetensors",
    "a\n.safetensors",
    "a.safetensors\n",
    "n" * 4096 + ".safetensors",
    "pytorch_model.bin",
    7,
    None,
    ["a.safetensors"],
]


@pytest.mark.parametrize("shard", BAD_SHARD_NAMES, ids=lambda name: repr(name)[:24])
def test_shard_names_must_be_plain(shard: object, tmp_path: Path) -> None:
    write_sharded(tmp_path / "m", {A: PLAIN})
    write_safetensors(tmp_path / "model.safetensors", PLAIN)
    write_index(tmp_path / "m", {"w": shard, "v": A, "s": A})
    with pytest.raises(FormatError, match="a shard is a plain file name"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", 7], ids=repr)
def test_a_wrong_weight_map_is_refused(weight_map: object, tmp_path: Path) -> None:
    write_sharded(tmp_path, {A: PLAIN})
    write_index(tmp_path, weight_map)
    with pytest.raises(FormatError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, dict[str, Array]], dict[str, str], str]] = [
        ({A: PLAIN}, {"more": A}, "tensor 'more' is not in it"),
        ({A: PLAIN}, {"w": B}, "tensor 'w' is not listed for it"),
        ({A: PLAIN, B: {"x": PLAIN["w"], "w": PLAIN["w"]}}, {"w": A}, "'w' is not listed for it"),
    ]
    for index, (shards, changes, message) in enumerate(cases):
        folder = write_sharded(tmp_path / str(index), {B: {"x": PLAIN["w"]}} | shards)
        weight_map = {name: shard for shard, arrays in shards.items() for name in arrays}
        write_index(folder, {"x": B} | weight_map | changes)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(folder)
    folder = write_sharded(tmp_path / "missing", SHARDS)
    (folder / B).unlink()
    with pytest.raises(ModelNotFound, match=B):
        open_checkpoint(folder)


# Links.


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_link_out_of_the_model_is_refused(name: str, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", PLAIN)
    for extra in ("tokenizer_config.json", "tokenizer.json"):
        (model / extra).write_text("{}")
    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=f"{name}: a link to .*outside"):
        open_checkpoint(model)


def test_a_shard_link_out_of_the_model_is_refused(tmp_path: Path) -> None:
    model = write_sharded(tmp_path / "model", {A: PLAIN})
    (model / A).rename(tmp_path / A)
    (model / "sub").symlink_to(tmp_path)
    (model / A).symlink_to(Path("sub") / A)
    with pytest.raises(FormatError, match="outside"):
        open_checkpoint(model)


def test_links_inside_the_model_and_to_the_model_are_allowed(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", PLAIN)
    (model / "model.safetensors").rename(model / "weights")
    (model / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(model)
    assert len(open_checkpoint(tmp_path / "link", verify=True).names) == 3


def test_a_hub_cache_is_read_and_its_blobs_must_be_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = write_hf(cache / "snapshots" / "0123abcd", PLAIN)
    (cache / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    assert len(open_checkpoint(snapshot, verify=True).names) == 3
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (cache / "blobs" / "model.safetensors").rename(other / "model.safetensors")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(
        "../../../models--org--other/blobs/model.safetensors"
    )
    with pytest.raises(FormatError, match="outside"):
        open_checkpoint(snapshot)


# Quantisation.

GOOD: list[tuple[str, dict[str, Array], dict[str, Any], dict[str, str]]] = [
    ("none", PLAIN, {}, {"w": "bf16", "v": "f16", "s": "f32"}),
    ("null", PLAIN, {"quantization_config": None}, {"w": "bf16", "v": "f16", "s": "f32"}),
    ("mxfp4", EXPERTS, config("mxfp4"), {"e": "mxfp4", "e_bias": "bf16"}),
    (
        "autobitlinear",
        TERNARY,
        config("bitnet", linear_class="autobitlinear"),
        {"p.weight": "ternary", "n.weight": "bf16"},
    ),
    (
        "bitlinear",
        TERNARY,
        config("bitnet", linear_class="bitlinear", quantization_mode="offline"),
        {"p.weight": "ternary_inverse", "n.weight": "bf16"},
    ),
    ("default", TERNARY, config("bitnet"), {"p.weight": "ternary_inverse", "n.weight": "bf16"}),
    (
        "online",
        PLAIN,
        config("bitnet", linear_class="autobitlinear", quantization_mode="online"),
        {"w": "bf16", "v": "f16", "s": "f32"},
    ),
    ("fp8", FP8, config("fp8", weight_block_size=[128, 128]), {"p.weight": "fp8_e4m3_b128_f32"}),
]


@pytest.mark.parametrize(
    ("arrays", "settings", "expected"),
    [case[1:] for case in GOOD],
    ids=[case[0] for case in GOOD],
)
def test_quantised_tensors_are_recognised(
    arrays: dict[str, Array], settings: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, arrays, settings), verify=True)
    assert formats(checkpoint) == expected


def changed(arrays: dict[str, Array], **changes: Array | None) -> dict[str, Array]:
    merged = arrays | {name.replace("__", "."): stored for name, stored in changes.items()}
    return {name: stored for name, stored in merged.items() if stored is not None}


ONLINE = {"linear_class": "autobitlinear", "quantization_mode": "online"}
BAD: list[tuple[str, dict[str, Array], dict[str, Any], type[ModelError], str]] = [
    ("other", PLAIN, config("tt"), UnsupportedModel, "'tt' is not known; known: mxfp4, bitnet"),
    (
        "no method",
        PLAIN,
        {"quantization_config": {}},
        UnsupportedModel,
        "known: mxfp4, bitnet, fp8",
    ),
    ("list", PLAIN, {"quantization_config": []}, FormatError, "expected an object"),
    ("method is a list", PLAIN, {"quantization_config": {"quant_method": []}}, ModelError, "known"),
    ("packed without config", EXPERTS, {}, UnsupportedModel, "'e_blocks': dtype U8 has no meaning"),
    ("f8 without config", FP8, {}, UnsupportedModel, "dtype F8_E4M3"),
    ("i64", changed(PLAIN, i=array("I64", 1)), {}, UnsupportedModel, "'i': dtype I64"),
    ("no scales", changed(EXPERTS, e_scales=None), config("mxfp4"), FormatError, "e_scales.*miss"),
    ("no blocks", changed(EXPERTS, e_blocks=None), config("mxfp4"), FormatError, "no tensor is p"),
    ("i8", changed(EXPERTS, e_blocks=array("I8", 2, 3, 4, 16)), config("mxfp4"), FormatError, "I8"),
    (
        "scales shape",
        changed(EXPERTS, e_scales=array("U8", 2, 3, 5)),
        config("mxfp4"),
        FormatError,
        r"'e_blocks': mxfp4: plane 'scales'.*\[2, 3, 5\], expected uint8\[2, 3, 4\]",
    ),
    (
        "block length",
        changed(EXPERTS, e_blocks=array("U8", 2, 3, 4, 8)),
        config("mxfp4"),
        FormatError,
        "plane 'blocks'",
    ),
    ("flat", changed(EXPERTS, e_blocks=array("U8", 16)), config("mxfp4"), FormatError, "dimension"),
    (
        "empty",
        changed(EXPERTS, e_blocks=array("U8", 2, 0, 4, 16)),
        config("mxfp4"),
        FormatError,
        "0",
    ),
    ("twice", changed(EXPERTS, e=array("BF16", 1)), config("mxfp4"), FormatError, "both packed"),
    (
        "linear_class",
        TERNARY,
        config("bitnet", linear_class="magic"),
        UnsupportedModel,
        "linear_class 'magic' is not known; known: autobitlinear, bitlinear",
    ),
    (
        "mode",
        TERNARY,
        config("bitnet", quantization_mode="later"),
        UnsupportedModel,
        "known: offline, online",
    ),
    ("packed online", TERNARY, config("bitnet", **ONLINE), FormatError, "mode is online"),
    ("plain offline", PLAIN, config("bitnet"), FormatError, "no tensor is packed"),
    (
        "no scale",
        changed(TERNARY, p__weight_scale=None),
        config("bitnet"),
        FormatError,
        "'p.weight': packed, but 'p.weight_scale' is missing",
    ),
    (
        "scale alone",
        changed(TERNARY, q__weight_scale=array("BF16", 1)),
        config("bitnet"),
        FormatError,
        "'q.weight_scale': no packed weight",
    ),
    (
        "scale dtype",
        changed(TERNARY, p__weight_scale=array("I32", 1)),
        config("bitnet"),
        FormatError,
        "I32, expected F32 or F16 or BF16",
    ),
    (
        "two scales",
        changed(TERNARY, p__weight_scale=array("BF16", 2)),
        config("bitnet"),
        FormatError,
        "plane 'scale'",
    ),
    (
        "3-d",
        changed(TERNARY, p__weight=array("U8", 2, 2, 5, fill=0)),
        config("bitnet"),
        FormatError,
        "3 dimensions",
    ),
    ("block", FP8, config("fp8", weight_block_size=[64, 64]), UnsupportedModel, "64.*128, 128"),
    ("scheme", FP8, config("fp8", activation_scheme="odd"), UnsupportedModel, "dynamic, static"),
    (
        "fp8 scale shape",
        changed(FP8, p__weight_scale_inv=array("F32", 1, 2)),
        config("fp8"),
        FormatError,
        r"scale_inv': shape \[1, 2\], expected \[2, 2\]",
    ),
    ("fp8 e5m2", {"p.weight": array("F8_E5M2", 2, 2)}, config("fp8"), ModelError, "no tensor is"),
]


@pytest.mark.parametrize(
    ("arrays", "settings", "error", "message"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_contradictions_and_unknown_settings_are_refused(
    arrays: dict[str, Array],
    settings: dict[str, Any],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(write_hf(tmp_path, arrays, settings))


@pytest.mark.parametrize(
    ("name", "arrays", "settings"),
    [
        ("e", changed(EXPERTS, e_scales=array("U8", 2, 3, 4, fill=255)), config("mxfp4")),
        ("p.weight", changed(TERNARY, p__weight=array("U8", 2, 5, fill=0xC0)), config("bitnet")),
        ("p.weight", changed(FP8, p__weight=array("F8_E4M3", 130, 129, fill=255)), config("fp8")),
    ],
    ids=["mxfp4", "ternary", "fp8"],
)
def test_forbidden_codes_are_looked_for_as_documented(
    name: str,
    arrays: dict[str, Array],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, arrays, settings))
    with pytest.raises(FormatError, match=f"tensor '{name}'"):
        checkpoint.tensor(name)
    with pytest.raises(FormatError, match=f"tensor '{name}'"):
        open_checkpoint(tmp_path, verify=True)
    monkeypatch.setattr(base, "CHECK_LIMIT_BYTES", 0)
    if name == "e":
        with pytest.raises(FormatError):
            checkpoint.tensor(name)
    else:
        assert np.isnan(checkpoint.tensor(name).decode()).any() == (settings == config("fp8"))
    with pytest.raises(FormatError):
        checkpoint.tensor(name, verify=True)


def test_close_leaves_views_usable(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(copy_model(LLAMA, tmp_path / "m"))
    plane = checkpoint.tensor("model.norm.weight").planes["data"]
    before = plane.tobytes()
    checkpoint.release()
    assert plane.tobytes() == before


def test_reading_a_model_loads_neither_torch_nor_numba() -> None:
    code = (
        "import sys; from clocher_runtime.checkpoints import open_checkpoint;"
        f"open_checkpoint({str(GPTOSS)!r}, verify=True);"
        "sys.exit(bool({'torch', 'numba', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Shards without an index.


@pytest.mark.parametrize("numbers", [(1, 2), (0, 1, 2)], ids=["from one", "from nought"])
def test_numbered_shards_need_no_index(numbers: tuple[int, ...], tmp_path: Path) -> None:
    parts = [{}, {}, {}]
    for place, (name, stored) in enumerate((PLAIN | EXPERTS).items()):
        parts[place % len(numbers)][name] = stored
    (tmp_path / "config.json").write_text(json.dumps(config("mxfp4")))
    names = [f"model-{number:05d}-of-00002.safetensors" for number in numbers]
    for name, arrays in zip(names, parts, strict=False):
        write_safetensors(tmp_path / name, arrays)
    (tmp_path / "model-00001-of-00002.safetensors.part").write_bytes(b"not looked at")
    found = open_checkpoint(tmp_path)
    single = open_checkpoint(write_hf(tmp_path / "single", PLAIN | EXPERTS, config("mxfp4")))
    assert formats(found) == formats(single)
    assert [file.path.name for file in found.files] == names


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["1-of-3", "3-of-3"], ModelNotFound, "1 of 3 shards are missing.*model-00002-of-00003"),
        (["0-of-2", "2-of-2"], ModelNotFound, "1 of 3 shards are missing.*model-00001-of-00002"),
        (["1-of-1", "1-of-2"], FormatError, "do not belong together"),
        (["3-of-2"], FormatError, "do not belong together"),
        (["1-of-99999"], FormatError, "do not belong together"),
        (["1-of-2", "2-of-2"], FormatError, "'a' is in another shard"),
    ],
)
def test_numbered_shards_that_are_not_all_there_are_refused(
    names: list[str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name in names:
        number, _, total = name.split("-")
        path = tmp_path / f"model-{int(number):05d}-of-{int(total):05d}.safetensors"
        write_safetensors(path, {"a": array("F32", 2)})
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)
