"""What a start overlaps: memory asked for ahead, packing in the background, files read ahead."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.disk import files
from cpu_fallback.team import large_pages
from cpu_fallback.team.large_pages import HUGE
from cpu_fallback.tiles import tile_cache, tile_pack


def _tensor(n: int = 64, k: int = 256) -> QuantTensor:
    rng = np.random.default_rng(n + k)
    values = rng.standard_normal((n, k), dtype=np.float32)
    return encode(values, parse_format("int4_sym_g32_f16"))


@pytest.fixture
def ahead() -> large_pages._Ahead:
    """Return memory of three batches."""
    return large_pages._Ahead(3 * large_pages._BATCH)


def test_memory_is_handed_out_from_one_end_and_fetched_from_the_other(
    ahead: large_pages._Ahead,
) -> None:
    first, second = ahead.take(HUGE + 1), ahead.take(HUGE)
    assert first is not None and second is not None
    assert first.ctypes.data % HUGE == 0 and second.ctypes.data % 64 == 0
    assert not np.shares_memory(first, second)
    first[:], second[:] = 1, 2
    ahead.fetch()
    assert ahead.spare >= 2 * large_pages._BATCH
    assert first.all() and (second == 2).all()  # what is taken is not written
    rest = ahead.take(ahead.spare)
    assert rest is not None and not rest.any()
    ahead.close()
    assert ahead.take(1) is None and ahead.spare == 0 and first.all()


def test_what_nobody_took_is_given_back(ahead: large_pages._Ahead) -> None:
    piece = ahead.take(HUGE)
    assert piece is not None
    ahead.fetch()
    before = _resident()
    ahead.close()
    assert before - _resident() > 2 * large_pages._BATCH
    assert not piece.any()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_tensors_packed_together_are_those_packed_alone() -> None:
    tensors, told = [_tensor(16 * i) for i in range(1, 9)], []
    alone = [tile_pack.pack(tile_pack.layout_of("test", t.format), t).data for t in tensors]
    with tile_cache.packing(told.append) as here:
        packed = [tile_pack.tiles_of("test", t) for t in tensors]
        assert [tile_pack.tiles_of("test", t) for t in tensors] == packed
    assert here.queued == sum(told) == sum(t.nbytes for t in tensors)
    for one, other in zip(alone, packed, strict=True):
        np.testing.assert_array_equal(one, other.data)


def test_an_interrupt_leaves_no_tiles_that_are_not_whole() -> None:
    tensor = _tensor()
    with pytest.raises(KeyboardInterrupt), tile_cache.packing(lambda _: None):
        tile_pack.tiles_of("test", tensor)
        assert tile_pack.is_packed(tensor)
        raise KeyboardInterrupt
    assert not tile_pack.is_packed(tensor)
    assert not tile_pack._unfinished


def test_another_thread_gets_tiles_that_are_whole() -> None:
    tensor = _tensor(4096, 256)
    alone = tile_pack.pack(tile_pack.layout_of("test", tensor.format), tensor).data
    with tile_cache.ThreadPoolExecutor(1) as other:
        with tile_cache.packing(lambda _: None):
            tile_pack.tiles_of("test", tensor)
            found = other.submit(lambda: tile_pack.tiles_of("test", tensor).data.copy())
        np.testing.assert_array_equal(found.result(), alone)


def test_files_that_are_not_in_memory_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, missing = tmp_path / "weights", tmp_path / "missing"
    path.write_bytes(bytes(20 << 20))
    counts: list[int] = []
    readv = os.readv
    monkeypatch.setattr(os, "readv", lambda *what: counts.append(readv(*what)) or counts[-1])
    files.read_ahead([path])  # just written, so it is in memory
    files.read_ahead([missing])  # opening it gives the error
    assert not _reading() and not counts
    monkeypatch.setattr(files, "_is_cached", lambda path: False)
    files.read_ahead([path])
    for thread in _reading():
        thread.join(30)
    assert sum(counts) == 20 << 20


def _reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "clocher-reading"]
