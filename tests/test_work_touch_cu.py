"""work_touch.cu: its indexing, emulated in NumPy, and its compilation by NVRTC.

NVRTC needs no GPU and no driver. Its library is that of the nvidia-cuda-nvrtc wheels, or of a CUDA
toolkit; without one the compile tests are left out.
"""

import ctypes
import ctypes.util
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from clocher_kernels.cuda.raw_module import OPTIONS, DeviceWorkTouch, source
from clocher_kernels.errors import DeviceError, ModelError
from clocher_runtime.engine.probes import WorkTouch


def _find_nvrtc() -> str | None:
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13", "nvidia.cu12"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            found = sorted(Path(folder, "lib").glob("libnvrtc.so.*"))
            if found:
                return str(found[0])
    return ctypes.util.find_library("nvrtc")


NVRTC = _find_nvrtc()
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="libnvrtc is not installed")


def compile_cubin(text: str, arch: str) -> tuple[int, str, bytes]:
    """Return NVRTC's status, its log and the machine code."""
    nvrtc = ctypes.CDLL(NVRTC)
    program = ctypes.c_void_p()
    assert (
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 0, None, None) == 0
    )
    options = [o.encode() for o in (*OPTIONS, f"-arch={arch}")]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    code = ctypes.create_string_buffer(0)
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), code.raw


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_it_compiles_without_warnings_and_without_spills(arch: str, tmp_path: Path) -> None:
    status, log, code = compile_cubin(source(), arch)
    assert status == 0 and not log.strip(), log
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(code)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    used = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    assert used["REG"] <= 64 and used["STACK"] == used["LOCAL"] == 0, usage


@needs_nvrtc
def test_a_broken_source_does_not_compile() -> None:
    status, log, _ = compile_cubin(source() + "\nint broken = ;", "sm_80")
    assert status != 0 and "error" in log


class Emulated:
    """The kernel in NumPy, thread by thread, with its own names."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.tokens = self.checksum = self.position = 0

    def find_part(self, at: int) -> int:
        low, high = 0, len(self.parts) - 1
        while low < high:
            middle = (low + high) // 2
            if self.ends[middle] > at:
                high = middle
            else:
                low = middle + 1
        return low

    def launch(self, blocks: int, width: int, per_token: int, stride: int, tokens: int) -> None:
        size = int(self.ends[-1])
        reads = (per_token + stride - 1) // stride
        for first in range(blocks * width):
            begin = self.position
            for _ in range(tokens):
                for k in range(first, reads, blocks * width):
                    at = begin + k * stride
                    if at >= size:
                        at %= size
                    part = self.find_part(at)
                    offset = at - int(self.ends[part - 1]) if part else at
                    self.checksum += int(self.parts[part][offset])
                begin = (begin + per_token) % size
        self.checksum %= 1 << 64
        self.tokens += tokens
        self.position = begin


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 200),
    st.integers(1, 70),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_its_indexing_gives_the_checksum_of_the_cpu(
    files: list[bytes], per_token: int, stride: int, steps: list[int], blocks: int
) -> None:
    parts = [np.frombuffer(file, np.uint8) for file in files]
    kernel, cpu = Emulated(parts), WorkTouch(parts, per_token, stride)
    for tokens in steps:
        kernel.launch(blocks, 4, per_token, stride, tokens)
        cpu(tokens)
        assert (kernel.tokens, kernel.checksum) == (cpu.tokens, cpu.checksum)
        assert kernel.position == cpu.tokens * per_token % sum(map(len, files))


def test_nothing_to_touch_is_an_error() -> None:
    with pytest.raises(ModelError, match="no weights"):
        DeviceWorkTouch([], 1, 256)


def test_zero_bytes_per_token_needs_neither_cupy_nor_a_gpu() -> None:
    touch = DeviceWorkTouch([], 0, 256)
    touch(5)
    assert (touch.tokens, touch.checksum, touch.bytes_read) == (0, 0, 0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import torch

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"clocher\[cuda\]"):
        DeviceWorkTouch([torch.zeros(8, dtype=torch.uint8)], 1, 256)


@pytest.mark.gpu
def test_the_kernel_gives_the_checksum_of_the_cpu() -> None:
    import torch

    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, size, dtype=np.uint8) for size in (100_003, 1, 65_536)]
    touch = DeviceWorkTouch([torch.from_numpy(p).cuda() for p in parts], 70_001, 256)
    cpu = WorkTouch(parts, 70_001, 256)
    for tokens in (1, 8, 3):
        touch(tokens)
        cpu(tokens)
        assert (touch.tokens, touch.checksum) == (cpu.tokens, cpu.checksum)


def test_counters_are_read_on_the_stream_that_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on: list[object] = []

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        on.append(chosen)
        yield
        on.pop()

    class State:
        def __getitem__(self, index: int) -> int:
            assert on == ["the steps' stream"]
            return 7 + index

    monkeypatch.setattr(torch.cuda, "stream", stream)
    touch = object.__new__(DeviceWorkTouch)
    touch.bytes_per_token, touch.stride = 64, 1
    touch._state, touch._stream = State(), "the steps' stream"
    assert (touch.tokens, touch.checksum, touch.bytes_touched) == (7, 8, 7 * 64)
