"""The tile cache: whole files or none, whoever dies when; the right file; never too many."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from sessions import make_session

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.load import load_model
from cpu_fallback.tiles import tile_cache, tile_pack
from cpu_fallback.tiles.layout import layout_of
from cpu_fallback.tiles.tile_cache import LIMIT_VARIABLE, TileCache, key_of

ROOT = Path(__file__).parents[1]
KEY = "0" * 64


def data_of(name: str, nbytes: int) -> np.ndarray:
    return np.random.default_rng(crc32(name.encode())).integers(0, 256, nbytes, np.uint8)


def tensor_of(name: str, *shape: int) -> QuantTensor:
    rng = np.random.default_rng(crc32(f"{name}{shape}".encode()))
    return encode(rng.standard_normal(shape, dtype=np.float32), parse_format(name))


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def taken(cache: TileCache, key: str, out: np.ndarray) -> bool:
    """Copy the tiles of a key, and say whether there are any."""
    found = cache.read(key, out.nbytes)
    if found is not None:
        assert not found.flags.writeable and found.ctypes.data % 4096 == 0
        out[:] = found
    return found is not None


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Switch the cache on, in a directory of the test's own; yield where its files are."""
    monkeypatch.setenv(LIMIT_VARIABLE, "64")
    monkeypatch.setattr(tile_cache, "cache_root", lambda: tmp_path)
    return tmp_path / "tiles"


@pytest.mark.parametrize("nbytes", [1, 4095, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_what_is_written_is_read(tmp_path: Path, nbytes: int) -> None:
    cache, data = TileCache(tmp_path, 1 << 30), data_of("round trip", nbytes)
    out = np.zeros_like(data)
    assert not taken(cache, KEY, out)
    cache.write(KEY, data)
    assert taken(cache, KEY, out)
    np.testing.assert_array_equal(out, data)
    assert not taken(cache, "1" * 64, out)
    assert not taken(cache, KEY, np.zeros(nbytes + 1, np.uint8))


def cut(content: bytes) -> bytes:
    return content[:-1]


def grow(content: bytes) -> bytes:
    return content + b"\0"


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def flip_chunk(content: bytes) -> bytes:
    return content[: 5 << 20] + bytes([content[5 << 20] ^ 0x80]) + content[(5 << 20) + 1 :]


def flip_hash(content: bytes) -> bytes:
    return content[:16] + bytes([content[16] ^ 1]) + content[17:]


def other_magic(content: bytes) -> bytes:
    return b"clocher tiles 0\n" + content[16:]


def nothing(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    "damage", [cut, grow, flip_last, flip_chunk, flip_hash, other_magic, nothing]
)
def test_a_damaged_file_is_not_read(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cache, data = TileCache(tmp_path, 1 << 30), data_of("damage", 6 << 20)
    cache.write(KEY, data)
    path = cache.directory / f"{KEY}.tiles"
    path.write_bytes(damage(path.read_bytes()))
    out = np.zeros_like(data)
    assert not taken(cache, KEY, out)
    cache.write(KEY, data)
    assert taken(cache, KEY, out)
    np.testing.assert_array_equal(out, data)


def test_tiles_are_mapped_and_not_copied(cached: Path) -> None:
    """So all processes have them in memory once."""
    tiles = tile_pack.tiles_of("test", tensor_of("int4_sym_g32_f16", 64, 4096)).data
    (path,) = cached.glob("*.tiles")
    place = tiles.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(at, 16) for at in line.split()[0].split("-"))
        if start <= place < end:
            assert line.endswith(str(path)) and "r--s" in line
            break
    else:
        raise AssertionError("the tiles lie in no mapping")
    assert not tiles.flags.writeable


def test_a_damaged_file_is_packed_again(cached: Path) -> None:
    def packed() -> bytes:
        return tile_pack.tiles_of("test", tensor_of("int4_sym_g32_f16", 20, 96)).data.tobytes()

    first = packed()
    (path,) = cached.glob("*.tiles")
    whole = path.read_bytes()
    assert packed() == first
    path.write_bytes(whole[:-9] + bytes(9))
    assert packed() == first and path.read_bytes() == whole


def test_tiles_come_from_the_cache(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    original = tile_pack.pack
    monkeypatch.setattr(tile_pack, "pack", lambda *a: packed.append(a) or original(*a))
    for name in ("mxfp4", "ternary_f32", "int8_row_f32", "int4_asym_g32_f16"):
        first = tile_pack.tiles_of("test", tensor_of(name, 36, 96))
        again = tile_pack.tiles_of("test", tensor_of(name, 36, 96))
        assert again.data is not first.data
        np.testing.assert_array_equal(again.data, first.data)
        assert replace(again, data=first.data) == first
    assert len(packed) == len(list(cached.glob("*.tiles"))) == 4


def test_results_are_the_same_bits_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits() -> np.ndarray:
        model = load_model(open_checkpoint(embedded_model()))  # planes of its own: packed anew
        session = make_session(model, threads=2, context=64, all_logits=True)
        try:
            return session.logits(list(range(1, 40)))
        finally:
            session.close()

    expected = logits()
    monkeypatch.setattr(tile_cache, "cache_root", lambda: tmp_path)
    assert not (tmp_path / "tiles").exists()
    monkeypatch.setenv(LIMIT_VARIABLE, "64")
    np.testing.assert_array_equal(logits(), expected)
    files = {path: path.stat().st_ino for path in (tmp_path / "tiles").glob("*.tiles")}
    assert files
    np.testing.assert_array_equal(logits(), expected)
    assert {path: path.stat().st_ino for path in (tmp_path / "tiles").glob("*.tiles")} == files


def test_the_files_used_least_recently_go(tmp_path: Path) -> None:
    size = 3 * tile_cache._HEADER
    cache = TileCache(tmp_path, 3 * (size + tile_cache._HEADER))
    names = [str(i) * 64 for i in range(6)]

    def there() -> set[str]:
        return {path.stem[0] for path in cache.directory.glob("*.tiles")}

    def use(number: int, age: int) -> None:
        os.utime(cache.directory / f"{names[number]}.tiles", ns=(0, 10**18 - age))

    for number in range(3):
        cache.write(names[number], data_of(names[number], size))
        use(number, 100 - number)
    assert there() == {"0", "1", "2"}
    assert taken(cache, names[0], np.zeros(size, np.uint8))  # now the one used last
    cache.write(names[3], data_of("3", size))
    assert there() == {"0", "2", "3"}
    use(0, 1)
    cache.write(names[4], data_of("4", 2 * size + tile_cache._HEADER))  # as large as two
    assert there() == {"3", "4"}
    cache.write(names[5], data_of("5", 4 * size))  # larger than the cache
    assert there() == {"3", "4"}


@pytest.mark.parametrize("raw", ["", "0", None])
def test_it_is_off_unless_asked_for(raw: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    if raw is not None:
        monkeypatch.setenv(LIMIT_VARIABLE, raw)
    assert TileCache.get() is None


@pytest.mark.parametrize("raw", ["-1", "all", "1e3", "1" * 10, " 1"])
def test_a_limit_that_is_none(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, raw)
    with pytest.raises(UsageError, match=rf"{LIMIT_VARIABLE}: got '{raw}', expected MiB"):
        TileCache.get()


@pytest.mark.parametrize("name", ["int4_asym_g32_f16", "int8_row_f32", "mxfp4", "ternary_f32"])
def test_the_key_depends_on_every_byte(name: str) -> None:
    tensor = tensor_of(name, 16, 96)
    layout = layout_of("test", tensor.format)
    keys = {key_of(layout, tensor, 1), key_of(layout, tensor, 2)}
    assert key_of(layout, tensor_of(name, 16, 96), 1) in keys  # and on nothing else
    expected = 2
    for plane, array in tensor.planes.items():
        for place in {0, array.size // 2, array.size - 1}:
            changed = array.copy()
            changed.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1
            planes = {**tensor.planes, plane: changed}
            keys.add(key_of(layout, QuantTensor(tensor.shape, tensor.format, planes), 1))
            expected += 1
    assert len(keys) == expected
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)


def test_the_key_depends_on_shape_format_and_layout() -> None:
    zeros = {"codes": np.zeros((16, 64), np.int8), "scales": np.zeros((16, 2), np.float32)}
    tensors = [
        QuantTensor((16, 64), parse_format("int8_g32_f32"), zeros),
        QuantTensor(
            (8, 128),
            parse_format("int8_g64_f32"),
            {
                "codes": zeros["codes"].reshape(8, 128),
                "scales": zeros["scales"].reshape(8, 4)[:, :2].copy(),
            },
        ),
        QuantTensor(
            (32, 32),
            parse_format("int8_g32_f32"),
            {
                "codes": zeros["codes"].reshape(32, 32),
                "scales": zeros["scales"].reshape(32, 1),
            },
        ),
    ]
    layouts = [layout_of("test", tensor.format) for tensor in tensors]
    keys = {key_of(layout, tensor, 1) for layout, tensor in zip(layouts, tensors, strict=True)}
    assert len(keys) == 3
    assert key_of(replace(layouts[0], block=64), tensors[0], 1) not in keys


_BUSY = """
import sys
from pathlib import Path
import numpy as np
from cpu_fallback.tiles.tile_cache import TileCache
cache = TileCache(Path(sys.argv[1]), 3 * 74_096)
for turn in range(150):
    number = (turn * int(sys.argv[2])) % 5
    out = cache.read(str(number) * 64, 70_000)
    if out is not None:
        assert (out == number).all()
    else:
        cache.write(str(number) * 64, np.full(70_000, number, np.uint8))
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    """They write, read and evict the same files."""
    both = [start(_BUSY, tmp_path, step) for step in (1, 2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
    cache = TileCache(tmp_path, 0)
    files = list(cache.directory.glob("*.tiles"))
    assert 1 <= len(files) <= 3
    assert not list(cache.directory.glob(".*.*")), "a temporary file was left behind"
    for path in files:
        out = np.zeros(70_000, np.uint8)
        assert taken(cache, path.stem, out) and (out == int(path.stem[0])).all()


_STUCK = """
import os, sys, time
from pathlib import Path
import numpy as np
from cpu_fallback.tiles import tile_cache
def stuck(fd):
    print("written", flush=True)
    time.sleep(60)
os.fsync = stuck
cache = tile_cache.TileCache(Path(sys.argv[1]), 1 << 30)
cache.write("7" * 64, np.full(3_000_000, 7, np.uint8))
"""


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    cache, out = TileCache(tmp_path, 1 << 30), np.zeros(3_000_000, np.uint8)
    writer = start(_STUCK, tmp_path)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        (left,) = cache.directory.glob(".7*")
        cache.write(KEY, data_of("other", 10))
        assert left.exists(), "the file of a living writer was removed"
        assert not taken(cache, "7" * 64, out)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
    assert not taken(cache, "7" * 64, out)
    cache.write(KEY, data_of("other", 10))
    assert not left.exists()
    cache.write("7" * 64, np.full_like(out, 7))
    assert taken(cache, "7" * 64, out) and (out == 7).all()


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tiles").write_text("not a directory")
    cache, data = TileCache(tmp_path, 1 << 30), data_of("blocked", 100)
    cache.write(KEY, data)
    assert "could not store packed weights" in caplog.text
    assert not taken(cache, KEY, np.zeros_like(data))


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    cache = TileCache(tmp_path, 1 << 30)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        cache.write(KEY, data_of("full", 100))
    assert "No space left" in caplog.text
    assert [path.name for path in cache.directory.iterdir()] == [".lock"]


def test_the_files_of_other_versions_differ(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_pack.tiles_of("test", tensor_of("int8_row_f32", 16, 64))
    assert len(list(cached.glob("*.tiles"))) == 1
    monkeypatch.setattr(tile_pack, "VERSION", tile_pack.VERSION + 1)
    tile_pack.tiles_of("test", tensor_of("int8_row_f32", 16, 64))
    assert len(list(cached.glob("*.tiles"))) == 2
