"""The directory of a ZIP archive whose records are stored as they are, read without surprises.

Two readers of ZIP archives can be made to see different files in one archive. Here one is read for
another reader that follows, so whatever two of them could understand differently is refused.

Source: APPNOTE.TXT 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import struct
from typing import NamedTuple

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.files import MappedFile

MAX_RECORDS = 100_000

_END = struct.Struct("<4s4HIIH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_SATURATED = 0xFFFFFFFF
_ENCRYPTED = 0x2041  # bits 0, 6 and 13: the data, strongly, the directory
_ZIP64 = 1


class Record(NamedTuple):
    """Where a record's bytes lie in the archive."""

    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the byte after the record."""
        return self.start + self.nbytes


def directory_bytes(file: MappedFile) -> int:
    """Return the size of an archive's directory, which another reader will take into memory.

    Raises:
        FormatError: the archive does not begin with a record and end with its directory.
    """
    _, begin, end = _directory(file)
    return end - begin


def stored_records(file: MappedFile) -> dict[str, Record]:
    """Return name -> place of the records of an archive, in the order of its directory.

    Refused, beside what is damaged: compressed or encrypted records, names that differ in case
    alone, records that overlap, bytes before the first one, and a comment at the end.

    Raises:
        FormatError: the archive is refused.
    """
    count, begin, end = _directory(file)
    data = file.bytes(begin, end).tobytes()
    found: dict[str, Record] = {}
    folded: set[str] = set()
    at = 0
    for _ in range(count):
        name, record, size = _entry(file, data, at, begin)
        at += size
        found[name] = record
        folded.add(name.casefold())
    if at != len(data) or len(folded) != count:
        raise _refused(file, "two records of one name, or a directory of another size")
    edge = 0
    for record in sorted(found.values()):
        if record.start < edge:
            raise _refused(file, "records overlap")
        edge = record.end
    return found


def _directory(file: MappedFile) -> tuple[int, int, int]:
    """Return how many entries the directory has, where it begins and where it ends."""
    at = file.nbytes - _END.size
    if at < 0 or file.bytes(0, 4).tobytes() != b"PK\3\4":
        raise _refused(file, "it does not begin with a record")
    magic, disk, first, here, count, nbytes, begin, comment = _END.unpack(
        file.bytes(at, file.nbytes).tobytes()
    )
    if magic != b"PK\5\6" or comment or (disk, here) != (first, count):
        raise _refused(file, "it does not end with a directory; it is truncated, or has a comment")
    end = at
    if at >= _LOCATOR.size + _END64.size:
        locator = _LOCATOR.unpack(file.bytes(at - _LOCATOR.size, at).tobytes())
        if locator[0] == b"PK\6\7":
            end = at - _LOCATOR.size - _END64.size
            end64 = _END64.unpack(file.bytes(end, end + _END64.size).tobytes())
            count, nbytes, begin = end64[7:]
            if end64[0] != b"PK\6\6" or end64[6] != count or locator[2] != end:
                raise _refused(file, "its directory contradicts itself")
    if count > MAX_RECORDS or begin + nbytes != end:
        raise _refused(
            file, f"{count} records in {nbytes} bytes of directory (limit {MAX_RECORDS})"
        )
    return count, begin, end


def _entry(file: MappedFile, data: bytes, at: int, limit: int) -> tuple[str, Record, int]:
    """Return name and place of a record, and the size of its entry in the directory."""
    if at + _ENTRY.size > len(data):
        raise _refused(file, "its directory is cut off")
    fields = _ENTRY.unpack_from(data, at)
    flags, method, packed, nbytes = fields[3], fields[4], fields[8], fields[9]
    lengths, disk, offset = fields[10:13], fields[13], fields[16]
    names = at + _ENTRY.size
    extras = names + lengths[0]
    size = _ENTRY.size + sum(lengths)
    raw = data[names:extras]
    if fields[0] != b"PK\1\2" or at + size > len(data) or disk:
        raise _refused(file, "its directory is damaged")
    if method or flags & _ENCRYPTED:
        raise _refused(file, f"{raw!r:.80} is compressed or encrypted")
    wide = [value == _SATURATED for value in (nbytes, packed, offset)]
    if any(wide):
        more = _zip64(file, data[extras : extras + lengths[1]], sum(wide))
        nbytes, packed, offset = (
            more.pop(0) if large else value
            for large, value in zip(wide, (nbytes, packed, offset), strict=True)
        )
    if offset + _LOCAL.size > limit or packed != nbytes:
        raise _refused(file, f"{raw!r:.80} is truncated")
    local = _LOCAL.unpack(file.bytes(offset, offset + _LOCAL.size).tobytes())
    start = offset + _LOCAL.size + local[9] + local[10]
    again = file.bytes(offset + _LOCAL.size, offset + _LOCAL.size + local[9]).tobytes()
    if local[0] != b"PK\3\4" or local[3] or again != raw or start + nbytes > limit:
        raise _refused(file, f"{raw!r:.80} is not where the directory says")
    try:
        return raw.decode("ascii"), Record(start, nbytes), size
    except UnicodeDecodeError:
        raise _refused(file, f"{raw!r:.80} is no plain name") from None


def _zip64(file: MappedFile, extra: bytes, count: int) -> list[int]:
    """Return the 64-bit sizes and offset of an entry that has no room for them."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == _ZIP64 and size >= 8 * count and at + size <= len(extra):
            return list(struct.unpack_from(f"<{count}Q", extra, at))
        at += size
    raise _refused(file, "a record without its 64-bit size")


def _refused(file: MappedFile, reason: str) -> FormatError:
    return FormatError(f"{file.path}: not a ZIP archive of stored records: {reason}")
