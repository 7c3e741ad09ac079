"""Peak memory from its three sources, and the work-touch against a plain computation."""

import numpy as np
import pytest
from commands import python
from hypothesis import given, settings
from hypothesis import strategies as st

from clocher_kernels.errors import ModelError
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.engine import probes
from clocher_runtime.engine.probes import WorkTouch, rss_peak_mib


def plain_checksums(data: bytes, per_token: int, stride: int, tokens: int) -> list[int]:
    """The documented definition, byte by byte: checksum after each token."""
    total, sums = 0, []
    for token in range(tokens):
        for at in range(0, per_token, stride):
            total += data[(token * per_token + at) % len(data)]
        sums.append(total % 2**64)
    return sums


@settings(max_examples=80)
@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=4).filter(lambda f: any(f)),
    st.integers(1, 200),
    st.integers(1, 70),
    st.integers(1, 6),
)
def test_checksum_equals_a_plain_computation_over_the_ring_of_files(
    files, per_token, stride, tokens
):
    touch = WorkTouch([np.frombuffer(f, np.uint8) for f in files], per_token, stride)
    expected = plain_checksums(b"".join(files), per_token, stride, tokens)
    got = []
    for _ in range(tokens):
        touch(1)
        got.append(touch.checksum)
    assert got == expected
    assert touch.bytes_touched == per_token * tokens


def test_tokens_of_one_step_count_one_by_one():
    data = np.arange(251, dtype=np.uint8)
    one, many = WorkTouch([data], 100, 7), WorkTouch([data], 100, 7)
    for _ in range(5):
        one(1)
    many(5)
    assert (one.checksum, one.tokens) == (many.checksum, many.tokens)


def test_checksum_is_carried_modulo_two_to_the_64():
    touch = WorkTouch([np.full(4, 255, np.uint8)], 4, 1)
    touch._counters = 0, 2**64 - 1
    touch(1)
    assert touch.checksum == 4 * 255 - 1


def test_mapped_file_is_read_in_place(tmp_path):
    path = tmp_path / "weights"
    content = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    mapped = MappedFile(path)
    touch = WorkTouch([mapped.bytes(0, mapped.nbytes)], 300_000, 256)
    touch(9)
    assert touch.checksum == plain_checksums(content.tobytes(), 300_000, 256, 9)[-1]
    content[0] += 1  # the first byte read is in the sum
    path.write_bytes(content.tobytes())
    again = WorkTouch([np.fromfile(path, np.uint8)], 300_000, 256)
    again(9)
    assert again.checksum != touch.checksum


@pytest.mark.parametrize(
    ("per_token", "stride", "read"),
    [(1000, 1, 1000), (1000, 64, 1000), (1000, 256, 4 * 64), (1024, 256, 4 * 64), (1, 256, 64)],
)
def test_bytes_read_counts_the_cache_lines_that_must_move(per_token, stride, read):
    touch = WorkTouch([np.zeros(4096, np.uint8)], per_token, stride)
    touch(3)
    assert touch.bytes_read == 3 * read


def test_zero_bytes_per_token_is_off_even_without_files():
    touch = WorkTouch([], 0, 256)
    touch(5)
    assert (touch.tokens, touch.bytes_touched, touch.checksum) == (0, 0, 0)


def test_nothing_to_touch_is_an_error():
    with pytest.raises(ModelError, match="no weight files"):
        WorkTouch([np.zeros(0, np.uint8)], 1, 256)


class Usage:
    ru_maxrss = 4096


def test_peak_memory_prefers_vmhwm(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmPeak:\t  999 kB\nVmHWM:\t  123 kB\nVmRSS:\t 7 kB\n")
    assert rss_peak_mib(status) == 123 / 1024


@pytest.mark.parametrize("content", ["", "Name:\tx\n", "VmHWM:\n", "VmHWM:\tmany kB\n"])
def test_peak_memory_falls_back_to_getrusage(tmp_path, monkeypatch, content):
    monkeypatch.setattr(probes.resource, "getrusage", lambda who: Usage)
    status = tmp_path / "status"
    status.write_text(content)
    assert rss_peak_mib(status) == rss_peak_mib(tmp_path / "absent") == 4


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_getrusage_unit_depends_on_the_platform(tmp_path, monkeypatch, platform, factor):
    monkeypatch.setattr(probes.sys, "platform", platform)
    monkeypatch.setattr(probes.resource, "getrusage", lambda who: Usage)
    assert rss_peak_mib(tmp_path / "absent") == 4 * factor / 1024


def test_peak_memory_of_a_process_follows_an_allocation():
    # Of its own: what this one took at most may be a gigabyte.
    code = "from clocher_runtime.engine.probes import rss_peak_mib as peak; import numpy as np;"
    code += "before = peak(); np.ones(int(before + 64) << 20, np.uint8); print(peak() - before)"
    assert float(python("-c", code).stdout) >= 60
