"""The manifest: rules, reasons to keep, the expanded form, parts, rounding under every option."""

import json
import re
import time
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from weight_files import GPTOSS, LLAMA, ROOT, array, write_hf

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_kernels.formats import Int4, Int8, parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert import imx, rounding
from clocher_runtime.convert.q4_entries import PlaneFile, part_of, plane_hashes, read_planes
from clocher_runtime.convert.q4_map import assign, load_q4_map, name_pattern, parse_q4_map
from clocher_runtime.convert.rounding import parse_clip, round_tensor
from clocher_runtime.disk.plane_index import Region

SCHEMA = json.loads((ROOT / "docs" / "q4-manifest.schema.json").read_text())
SEED = ROOT / "quant" / "q4_manifest.json"
RULE = {"pattern": ".*", "dtype": "int4w"}
FORMATS = [
    "int4_sym_g32_f16",
    "int4_asym_g32_f16",
    "int4_asym_g64_bf16",
    "int4_sym_row_f16",
    "int4_asym_row_f32",
    "int8_row_f32",
    "int8_g32_f16",
    "int8_tensor_f32",
]
SEARCH = {Int4: np.linspace(1.1, 0.55, imx.GRID), Int8: np.linspace(1.0, 0.9, imx.GRID)}
CLIPS = ["none", "mse", "clamp:0.03", "percentile:90", "percentile:99.5"]


def weights(*shape: int, dtype: str = "bf16") -> QuantTensor:
    rng = np.random.default_rng(zlib.crc32(f"{shape}".encode()))
    values = (0.02 * rng.standard_t(4, shape)).astype(np.float32)
    return encode(values, parse_format(dtype))


def equal(a: QuantTensor, b: QuantTensor) -> bool:
    return all(np.array_equal(a.planes[key], b.planes[key]) for key in b.planes)


# Rounding, against loops over cells.


def cells_of(matrix: np.ndarray, group: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    n, k = matrix.shape
    if group == "tensor":
        return [((0,), matrix.reshape(-1))]
    if group == "row":
        return [((row,), matrix[row]) for row in range(n)]
    return [
        ((row, start // group), matrix[row, start : start + group])
        for row in range(n)
        for start in range(0, k, group)
    ]


def brute_force(cell: np.ndarray, fmt: Any, clip: str) -> np.ndarray:
    """Return what a cell decodes to, by trying and by sorting."""
    kind, _, number = clip.partition(":")
    affine = "asym" in fmt.name
    low, high = cell.min(), cell.max()
    if kind == "clamp":
        limit = np.float32(number)
        low, high = max(low, -limit), min(high, limit)
    if kind == "percentile" and affine:
        ordered = np.sort(cell)
        outside = len(cell) - int(np.ceil(float(number) * len(cell) / 100 - 1e-9))
        low, high = ordered[outside], ordered[len(cell) - 1 - outside]
    elif kind == "percentile":
        limit = np.percentile(np.abs(cell), float(number), method="inverted_cdf")
        low, high = (-limit, 0) if -low > high else (0, limit)
    best, found = np.inf, cell
    for factor in SEARCH[type(fmt)] if kind == "mse" else (1.0,):
        f = np.float32(factor)
        if isinstance(fmt, Int8):
            ideal, codes = max(high, -low) / np.float32(127), (-127, 127)
        elif affine:
            ideal = max(high, np.float32(0)) / np.float32(15) - min(
                low, np.float32(0)
            ) / np.float32(15)
            codes = (0, 15)
        else:
            ideal, codes = (low if -low > high else high) / np.float32(-8), (-8, 7)
        scale = encode_scale(np.float32(ideal * f), fmt.scale_dtype)
        zero = np.float32(0)
        if affine:
            zero = np.clip(np.rint(-min(low * f, np.float32(0)) / scale), 0, 15)
        decoded = (np.clip(np.rint(cell / scale) + zero, *codes) - zero) * scale
        error = float(np.sum((decoded - cell).astype(np.float64) ** 2))
        if error < best:
            best, found = error, decoded
    return found


def encode_scale(ideal: np.float32, dtype: str) -> np.float32:
    stored = encode(np.array([[ideal]], np.float32), parse_format(dtype)).decode()
    return np.float32(stored[0, 0]) if stored[0, 0] else np.float32(1)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_brute_force(name: str, clip: str) -> None:
    fmt: Any = parse_format(name)
    for shape in ((3, 70), (4, 96)):
        source = weights(*shape)
        matrix, result = source.decode(), round_tensor(source, fmt, parse_clip(clip)).decode()
        expected = np.full(shape, np.nan, np.float32)
        for index, cell in cells_of(matrix, fmt.group):
            found = brute_force(cell, fmt, clip)
            if len(index) == 2:
                start = index[1] * fmt.group
                expected[index[0], start : start + len(found)] = found
            elif fmt.group == "row":
                expected[index[0]] = found
            else:
                expected[:] = found.reshape(shape)
        if clip == "mse":
            # The search refines what the factors give, so its error may only be lower.
            ours, theirs = (np.sum((x - matrix) ** 2) for x in (result, expected))
            assert ours <= theirs * (1 + 1e-5)
        else:
            assert np.array_equal(result, expected)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_does_not_depend_on_blocks_or_threads(
    name: str, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = weights(2, 5, 33)
    whole = round_tensor(source, parse_format(name), parse_clip(clip))
    monkeypatch.setattr(rounding, "_BLOCK_ELEMENTS", 70)
    assert equal(round_tensor(source, parse_format(name), parse_clip(clip), threads=3), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_every_clip_has_an_effect_and_mse_lowers_the_error(name: str) -> None:
    source = weights(8, 256)
    fmt = parse_format(name)
    tensors = {clip: round_tensor(source, fmt, parse_clip(clip)) for clip in CLIPS[:4]}
    seen = {tuple(plane_hashes(t).values()) for t in tensors.values()}
    # With one scale for all, the first that is tried may be the best.
    assert len(seen) == len(tensors) or name == "int8_tensor_f32"
    error = {c: float(np.sum((t.decode() - source.decode()) ** 2)) for c, t in tensors.items()}
    assert error["mse"] <= error["none"] < error["clamp:0.03"]
    assert equal(tensors["none"], encode(source.decode(), fmt))


@pytest.mark.parametrize("largest", [65000, 65504])
def test_a_range_near_the_largest_scale_is_searched_without_overflow(largest: int) -> None:
    values = np.linspace(-1, 1, 256, dtype=np.float32).reshape(8, 32) * 8 * largest
    result = round_tensor(
        encode(values, parse_format("f32")), parse_format("int4_sym_g32_f16"), parse_clip("mse")
    )
    assert np.isfinite(result.decode()).all()
    with pytest.raises(FormatError, match="beyond f16"):
        round_tensor(encode(values * 2, parse_format("f32")), result.format, parse_clip("mse"))


def test_mxfp4_experts_are_rounded_from_their_values() -> None:
    source = encode(weights(3, 6, 64).decode(), parse_format("mxfp4"))
    result = round_tensor(source, parse_format("int8_g32_f16"))
    assert np.array_equal(result.decode()[1], encode(source.decode()[1], result.format).decode())


@pytest.mark.parametrize(
    "text", ["", "mse:1", "none:", "percentile", "percentile:50", "percentile:101", "clamp:-1",
             "clamp:nan", "clamp:inf", "clip:3"],
)  # fmt: skip
def test_a_wrong_clip_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="known: none, percentile:P, clamp:C, mse"):
        parse_clip(text)


# Rules.


def test_the_manifest_of_the_repository_is_that_of_the_documentation() -> None:
    q4_map = load_q4_map(SEED)
    assert [rule.format.name for rule in q4_map.rules if rule.format] == ["int4_sym_g64_f16"] * 2
    jsonschema.validate(json.loads(SEED.read_text()), SCHEMA)
    formats, _ = q4_map.choose(open_checkpoint(LLAMA).tensors)
    assert len(formats) == 42


def rules(*items: dict[str, Any], **more: Any) -> Any:
    return parse_q4_map({"version": 1, "rules": list(items), **more}, Path("q4.json"))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"dtype": "int8"}, "int8_row_f32"),
        ({"dtype": "int4", "group": 256}, "int4_sym_g256_f16"),
        ({"dtype": "int4", "scale_dtype": "bf16"}, "int4_sym_row_bf16"),
        ({"dtype": "int8w", "scale_dtype": "f16"}, "int8_row_f16"),
        ({"dtype": "fp8"}, "fp8_e4m3_row_f32"),
        ({"dtype": "fp8w", "scale": "per-block"}, "fp8_e4m3_b128_f32"),
        ({"dtype": "fp8_e5m2w", "scale_dtype": "bf16"}, "fp8_e5m2_row_bf16"),
        ({"dtype": "mxfp4"}, "mxfp4"),
        ({"dtype": "ternaryw", "scale_dtype": "bf16"}, "ternary"),
    ],
)
def test_a_rule_means(rule: dict[str, Any], expected: str) -> None:
    assert rules({"pattern": ".*", **rule}).rules[0].format.name == expected
    jsonschema.validate({"version": 1, "rules": [{"pattern": ".*", **rule}]}, SCHEMA)


def test_every_reason_to_keep_is_said() -> None:
    keep = {"pattern": "model.layers.1.*", "dtype": "keep"}
    q4_map = rules(keep, {"pattern": ".*layers.*", "dtype": "int4w"})
    assigned = assign(q4_map.rules, open_checkpoint(GPTOSS).tensors, False, "here")
    kept = {name.removeprefix("model.layers."): reason for name, reason in assigned.kept.items()}
    assert kept["0.mlp.router.weight"] == "router"
    assert kept["0.mlp.router.bias"] == kept["0.mlp.experts.gate_up_proj_bias"] == "bias"
    assert kept["0.self_attn.sinks"] == "sinks"
    assert kept["0.input_layernorm.weight"] == kept["model.norm.weight"] == "norm"
    assert kept["0.mlp.experts.down_proj"] == "already mxfp4"
    assert kept["1.self_attn.q_proj.weight"] == "rule 0"
    assert kept["lm_head.weight"] == kept["model.embed_tokens.weight"] == "no rule"
    assert set(assigned.kept) | set(assigned.chosen) == set(open_checkpoint(GPTOSS).names)
    again = assign(q4_map.rules, open_checkpoint(GPTOSS).tensors, True, "here")
    assert set(again.chosen) - set(assigned.chosen) == {
        f"model.layers.{i}.mlp.experts.{p}_proj" for i in (0, 2, 3) for p in ("down", "gate_up")
    }


def test_experts_stored_as_floats_are_quantised(tmp_path: Path) -> None:
    arrays = {"model.layers.0.mlp.experts.down_proj": array("BF16", 2, 64, 8)}
    tensors = open_checkpoint(write_hf(tmp_path, arrays)).tensors
    (name,) = tensors
    q4_map = rules({"pattern": ".*", "dtype": "int4w", "group": 32, "clip": "mse"})
    assert list(q4_map.choose(tensors)[0]) == [name]
    source = open_checkpoint(tmp_path).tensor(name)
    result = q4_map.stored(name, source)
    assert result.shape == (2, 8, 64)
    expected = round_tensor(source, result.format, parse_clip("mse"))
    assert equal(result, expected)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"dtype": "keep", "group": 64}, "keep leaves no place for group"),
        ({"dtype": "int4w", "clip": "mean"}, "clip is 'mean'; known: none"),
        ({"dtype": "int4w", "method": "awq"}, "method is 'awq'; known: rtn, imx, gptq"),
        ({"dtype": "int4w", "scale_dtype": "f8"}, "scale_dtype is 'f8'; known: f16, f32, bf16"),
    ],
)
def test_a_wrong_rule_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rules({"pattern": ".*", **rule})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "rules": [{"pattern": ".*", **rule}]}, SCHEMA)


def test_a_scale_that_is_not_for_a_format_is_named() -> None:
    with pytest.raises(UsageError, match="scale per-block is not for int4"):
        rules({"pattern": ".*", "dtype": "int4w", "scale": "per-block"})


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)" * 99, "a?" * 200 + "a" * 90])
def test_a_hostile_pattern_takes_no_time(pattern: str) -> None:
    started = time.process_time()
    assert not name_pattern(pattern).fullmatch("a" * 511 + "c")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing \\)"),
        ("(?!x).*", "without look-around"),
        ("\ud800", "expected a regular expression"),
        ("a" * 501, "at most 500 characters"),
        ("((a{1,100}){1,100}){1,100}", "expected a regular expression"),
    ],
)
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused(
    pattern: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        rules({"pattern": pattern, "dtype": "int4w"})
    assert "rules[0]" in str(caught.value)


def test_rules_that_need_calibration_are_not_simply_rounded() -> None:
    q4_map = rules({"pattern": ".*proj.*", "dtype": "int4w", "group": 64, "method": "imx"})
    with pytest.raises(UsageError, match=r"rules\[0\] asks for imx, which needs calibration"):
        q4_map.choose(open_checkpoint(LLAMA).tensors)


@pytest.mark.parametrize("name", ["fp8_e4m3_b128_f32", "fp8_e5m2_row_f32", "mxfp4", "ternary_f16"])
def test_rounding_by_rows_is_the_encoding_of_the_whole(name: str) -> None:
    values = np.random.default_rng(3).standard_t(4, (300, 160)).astype(np.float32)
    source = encode(values, parse_format("f32"))
    expected = encode(values, parse_format(name))
    for rows, threads in ((0, 1), (7, 3), (130, 2)):
        assert equal(round_tensor(source, expected.format, threads=threads, rows=rows), expected)


# The expanded form.


def expanded(name: str = "w") -> tuple[dict[str, Any], QuantTensor]:
    source = weights(4, 64)
    tensor = round_tensor(source, parse_format("int4_sym_g32_f16"))
    entry = {
        "name": name,
        "shape": [4, 64],
        "format": tensor.format.name,
        "method": "rtn",
        "rule": 0,
        "bpw": 4.5,
        "nbytes": tensor.nbytes,
        "sha256": plane_hashes(tensor),
        "err": {"rms_rel": 0.1, "max_abs": 0.01, "cosine": 0.99},
    }
    document = {"version": 1, "rules": [RULE | {"group": 32}], "tensors": [entry], "kept": []}
    return document, source


def test_an_expanded_manifest_rounds_again_and_checks_the_hash() -> None:
    document, source = expanded()
    jsonschema.validate(document, SCHEMA)
    q4_map = parse_q4_map(document, Path("q4.json"), "ab")
    assert "tensors" not in q4_map.document and q4_map.document["sha256"] == "ab"
    result = q4_map.stored("w", source)
    assert plane_hashes(result) == document["tensors"][0]["sha256"]
    other = encode(source.decode() * 2, source.format)
    with pytest.raises(FormatError, match=r"plane 'scales'.*made from other weights"):
        q4_map.stored("w", other)


BROKEN: dict[str, tuple[Any, str]] = {
    "kept alone": (lambda d: d.pop("tensors"), "come with tensors"),
    "nbytes": (lambda d: d["tensors"][0].update(nbytes=1), "nbytes is 1"),
    "unknown plane": (lambda d: d["tensors"][0]["sha256"].update(x="0" * 64), "unknown field 'x'"),
    "hash": (lambda d: d["tensors"][0]["sha256"].update(codes="XY"), "64 lower-case hex"),
    "format": (lambda d: d["tensors"][0].update(format="int3"), "unknown format"),
    "method": (lambda d: d["tensors"][0].update(method="awq"), "known: rtn"),
    "method without planes": (lambda d: d["tensors"][0].update(method="gptq"), "need offsets"),
    "rule": (lambda d: d["tensors"][0].update(rule=1), "there are 1"),
    "offsets without a file": (
        lambda d: d["tensors"][0].update(offsets={"codes": 0, "scales": 128}),
        "a plane file of 0",
    ),
    "offsets outside": (
        lambda d: (
            d.update(planes={"file": "q4.planes.bin", "nbytes": 128, "sha256": "0" * 64}),
            d["tensors"][0].update(offsets={"codes": 0, "scales": 128}),
        ),
        "a plane file of 128",
    ),
    "file outside": (
        lambda d: d.update(planes={"file": "../x.planes.bin", "nbytes": 1, "sha256": "0" * 64}),
        "expected a plain name",
    ),
    "twice": (lambda d: d["tensors"].append(d["tensors"][0]), "there twice"),
    "kept too": (lambda d: d["kept"].append({"name": "w", "reason": "x"}), "there twice"),
    "unknown section": (lambda d: d.update(date="today"), "unknown field 'date'"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_contradictory_manifest_is_refused(broken: str, tmp_path: Path) -> None:
    document, _ = expanded()
    change, message = BROKEN[broken]
    change(document)
    path = tmp_path / "q4.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=re.escape(message)):
        load_q4_map(path)


def test_a_manifest_of_another_model_is_refused() -> None:
    document, source = expanded()
    q4_map = parse_q4_map(document, Path("q4.json"))
    assert q4_map.choose({"w": source})[0]
    for tensors, message in (
        ({}, "the model has no tensor 'w'"),
        ({"w": source, "v": source}, "says nothing about tensor 'v'"),
        ({"w": weights(4, 32)}, r"is \[4, 64\], in the model \[4, 32\]"),
        ({"w": encode(source.decode(), parse_format("mxfp4"))}, "is kept \\(already mxfp4\\)"),
    ):
        with pytest.raises(UsageError, match=message):
            q4_map.choose(tensors)


# The plane file.


def test_planes_are_written_found_again_and_checked(tmp_path: Path) -> None:
    manifest, path = tmp_path / "q4.json", tmp_path / "q4.planes.bin"
    tensors = {
        "model.layers.0.a": round_tensor(weights(4, 70), parse_format("int4_asym_g32_f16")),
        "model.layers.0.b": round_tensor(weights(2, 3, 32), parse_format("int8_row_f32")),
    }
    records = {name: {"method": "imx", "tokens_seen": 5} for name in tensors}
    planned = {name: (tensor.format, tensor.shape) for name, tensor in tensors.items()}

    def resumed(job: str = "job") -> Any:
        with PlaneFile(manifest, job) as file:
            file.resume(planned)
            return file.records

    with PlaneFile(manifest, "job") as file:
        file.resume(planned)
        assert not file.records
        for name, tensor in tensors.items():
            file.add(name, tensor, records[name])
        listed = file.finish()
        offsets = {name: file.offsets(name) for name in tensors}
        assert all(equal(file.tensors[name], tensor) for name, tensor in tensors.items())
    assert resumed() == records
    assert listed and (listed.file, listed.nbytes) == (path.name, path.stat().st_size)

    name, tensor = next(iter(tensors.items()))
    entry = parse_q4_map(expanded("w")[0], Path("q4.json")).entries["w"]
    hashes = plane_hashes(tensor)
    planes = tensor.format.planes(tensor.shape)
    regions = {key: Region("planes", at, planes[key].nbytes) for key, at in offsets[name].items()}
    entry = type(entry)(name, tensor.shape, tensor.format, regions, hashes, "imx", 0, {})
    assert equal(read_planes(path, listed.nbytes, entry), tensor)
    data = path.read_bytes()
    at = offsets[name]["scales"]
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(FormatError, match="SHA-256"):
        read_planes(path, listed.nbytes, entry)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert list(resumed()) == [name]
    path.write_bytes(data)
    assert resumed("another job") == {}
    with pytest.raises(ModelNotFound, match=r"q4\.planes\.bin: missing"):
        read_planes(path, listed.nbytes, entry)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.12.mlp.up_proj.weight", "layer-00012"),
        ("lm_head.weight", "rest"),
        ("layers.3.x", "layer-00003"),
        ("players.3.x", "rest"),
    ],
)
def test_a_tensor_belongs_to_the_part_of_its_layer(name: str, part: str) -> None:
    assert part_of(name) == part
