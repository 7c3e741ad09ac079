"""An opened checkpoint -> a compressed-tensors directory for vLLM, compared before its rename."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_kernels.formats import Float, Format, Fp8, Int4, Int8, Mxfp4
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.checkpoint import open_hf
from clocher_runtime.checkpoints.iebin import Progress, quiet
from clocher_runtime.checkpoints.locate import CONFIG
from clocher_runtime.convert.to_iebin import exported_formats, natural, vocabulary
from clocher_runtime.disk.output_file import PARTIAL, check_free, sync_directory, write_file
from clocher_runtime.engine.load import model_spec
from clocher_runtime.models.families import family_of
from clocher_runtime.models.inventory import EMBED, HEAD

SHARD_BYTES = 1_000_000_000
"""Bytes of a weight file, in memory as a whole; more if one linear has more."""

_STRATEGIES = {"tensor": "tensor", "row": "channel", "b128": "block"}
_TORCH = {"f32": ("int32", "float32"), "f16": ("int16", "float16"), "bf16": ("int16", "bfloat16")}


def scheme_of(fmt: Format) -> tuple[str, dict[str, Any]]:
    """Return the config group's `format` and `weights` for a format, or raise FormatError."""
    known: dict[str, Any] = {"symmetric": True, "dynamic": False}
    if isinstance(fmt, Int4 | Int8):
        groups = isinstance(fmt.group, int)
        known |= {"num_bits": 4 if isinstance(fmt, Int4) else 8, "type": "int"}
        known |= {"symmetric": not isinstance(fmt, Int4) or fmt.symmetric}
        strategy = {"strategy": "group", "group_size": fmt.group} if groups else {}
        return "pack-quantized", {"strategy": _STRATEGIES.get(str(fmt.group)), **known, **strategy}
    if isinstance(fmt, Fp8) and fmt.code_dtype == "e4m3":
        blocks = {"block_structure": [BLOCK, BLOCK]} if fmt.scope == "b128" else {}
        known |= {"num_bits": 8, "type": "float", "strategy": _STRATEGIES[fmt.scope]}
        return "float-quantized", {**known, **blocks}
    if isinstance(fmt, Mxfp4):
        known |= {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        dtypes = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return "mxfp4-pack-quantized", {**known, **dtypes}
    raise FormatError(
        f"{fmt.name}: compressed-tensors has no form for it; it has int4, int8, fp8 (e4m3), mxfp4"
    )


def _torch(array: np.ndarray, dtype: str) -> Any:
    import torch

    bits, name = _TORCH[dtype]
    return torch.from_numpy(array.view(bits).copy()).view(getattr(torch, name))


def _compressed(tensor: QuantTensor) -> dict[str, Any]:
    """Return a linear's arrays by name; the package gets the same codes from its values."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    fmt, planes = tensor.format, tensor.planes
    if isinstance(fmt, Float):
        return {"weight": _torch(planes["data"], fmt.dtype)}
    if isinstance(fmt, Mxfp4):  # the same bytes there
        blocks = planes["blocks"].reshape(tensor.shape[0], -1)
        both = {"weight_packed": blocks, "weight_scale": planes["scales"]}
        return {name: torch.from_numpy(array.copy()) for name, array in both.items()}
    assert isinstance(fmt, Int4 | Int8 | Fp8), "scheme_of has no other"
    form, args = scheme_of(fmt)
    scales = _torch(planes["scales"], fmt.scale_dtype)
    if args["strategy"] == "channel":
        scales = scales[:, None]
    state = {"weight": torch.from_numpy(tensor.decode()), "weight_scale": scales.float()}
    if "zeros" in planes:
        zeros = planes["zeros"].astype(np.int8).reshape(len(scales), -1) - np.int8(8)
        state["weight_zero_point"] = torch.from_numpy(zeros)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    made: dict[str, Any] = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    made["weight_scale"] = scales
    return {key: value.contiguous() for key, value in made.items()}


class CompressedConversion:
    """A model as a compressed-tensors directory: checked, ready to be written."""

    def __init__(self, source: Checkpoint, out_dir: Path, others: str | None = None) -> None:
        """Check the export; `others`: float type of matrices that do not fit; None refuses them."""
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise UsageError(f"{out_dir}: is not empty; choose another directory")
        try:
            import compressed_tensors  # noqa: F401
        except ImportError:
            raise UsageError(
                "--to compressed-tensors needs the package compressed-tensors, which is not "
                "installed; pip install '.[compressed]' in a clone of Clocher"
            ) from None
        spec = model_spec(source)
        stacked = any(len(tensor.shape) > 2 for tensor in source.tensors.values())
        if family_of(source.config).tensors or stacked:
            raise UnsupportedModel(
                f"a {spec.family} model as compressed-tensors: its files have other tensors than "
                "Clocher, or experts in a stack, which this writer does not take apart"
            )

        def check(name: str, fmt: Format) -> None:
            if name == EMBED and not isinstance(fmt, Float):
                raise FormatError(f"{fmt.name}: compressed-tensors has no quantised embedding")
            if not isinstance(fmt, Float):
                scheme_of(fmt)

        self.source, self._out_dir = source, out_dir
        names = sorted(source.names, key=natural)  # in the order of the files
        self._formats, self.floats = exported_formats(source, names, check, others)
        self.nbytes = sum(fmt.nbytes(source.shape(name)) for name, fmt in self._formats.items())
        check_free(out_dir, self.nbytes)

    def run(self, progress: Progress = quiet) -> None:
        """Write the directory. Raises ModelError, UnsupportedModel, OSError."""
        partial = self._out_dir.with_name(self._out_dir.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self._write(partial, progress)
            self.source.check_unchanged()
            self._check(partial)
            if self._out_dir.is_dir():
                self._out_dir.rmdir()  # which is empty
            partial.rename(self._out_dir)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_directory(self._out_dir.parent)

    def _write(self, folder: Path, progress: Progress) -> None:
        from safetensors.torch import save

        sizes = {name: fmt.nbytes(self.source.shape(name)) for name, fmt in self._formats.items()}
        shards: list[list[str]] = [[]]
        for name, nbytes in sizes.items():
            if shards[-1] and sum(sizes[n] for n in shards[-1]) + nbytes > SHARD_BYTES:
                shards.append([])
            shards[-1].append(name)
        where: dict[str, str] = {}
        done = 0
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = file if len(shards) > 1 else "model.safetensors"
            arrays = {}
            for name in names:
                made = _compressed(self._tensor(name))
                if set(made) == {"weight"}:
                    arrays[name] = made["weight"]
                else:
                    arrays |= {f"{_module(name)}.{key}": array for key, array in made.items()}
                self.source.release()
                done += sizes[name]
                progress(done, name)
            write_file(folder / file, save(arrays, {"format": "pt"}))
            where |= dict.fromkeys(arrays, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": where}
            _write_json(folder / "model.safetensors.index.json", index)
        _write_json(folder / CONFIG, self._config())
        if self.source.generation_config:
            _write_json(folder / "generation_config.json", self.source.generation_config)
        if tokenizer := vocabulary(self.source):
            write_file(folder / "tokenizer.json", tokenizer)
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            _write_json(folder / "tokenizer_config.json", kind | dict(self.source.tokenizer_config))

    def _tensor(self, name: str) -> QuantTensor:
        tensor, fmt = self.source.tensor(name, verify=True), self._formats[name]
        return tensor if tensor.format.name == fmt.name else encode(tensor.decode(), fmt)

    def _config(self) -> dict[str, Any]:
        config = {k: v for k, v in self.source.config.items() if k != "quantization_config"}
        config.setdefault("model_type", model_spec(self.source).family)
        linears: dict[str, list[str]] = {}
        for name, fmt in self._formats.items():
            if not isinstance(fmt, Float):
                linears.setdefault(fmt.name, []).append(name)
        if not linears:
            return config
        plain = [n for n, fmt in self._formats.items() if isinstance(fmt, Float)]
        ignore = [_module(n) for n in plain if len(self.source.shape(n)) == 2 and n != EMBED]
        if HEAD not in self.source.tensors:
            ignore.append(_module(HEAD))  # tied: a module that shares the embedding
        groups = {}
        for number, names in enumerate(linears.values()):
            form, args = scheme_of(self._formats[names[0]])
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(linears) == 1 else [_module(name) for name in names],
                "weights": args,
                "input_activations": None,
                "output_activations": None,
                "format": form,
            }
        forms = {group["format"] for group in groups.values()}
        settings = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": sorted(ignore, key=natural),
            "kv_cache_scheme": None,
        }
        return {**config, "quantization_config": settings}

    def _check(self, folder: Path) -> None:
        written = open_hf(folder)
        model_spec(written)
        for name in self._formats:
            own, found = self._tensor(name), written.tensor(name)
            if (own.format.name, own.shape) != (found.format.name, found.shape) or not all(
                np.array_equal(plane, found.planes[key]) for key, plane in own.planes.items()
            ):
                raise UnsupportedModel(f"{name} comes back with other numbers")
            self.source.release()
            written.release()


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_file(path, f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode())
