"""Records of a ZIP archive, with its directory bounded before a library reads it.

Source: APPNOTE.TXT 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import struct
import zipfile

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.files import MappedFile

MAX_RECORDS = 100_000
MAX_DIRECTORY_BYTES = 1 << 24

_END = struct.Struct("<4s4HIIH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")


def records_of(file: MappedFile) -> list[zipfile.ZipInfo]:
    """Return the records; FormatError for damage, overlaps, or names that differ in case alone."""
    _check_directory(file)
    try:
        with zipfile.ZipFile(file.path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError) as error:
        raise refused(file, str(error)) from None
    end = 0
    for record in sorted(records, key=lambda record: record.header_offset):
        if record.header_offset < end:
            raise refused(file, "records overlap")
        end = record.header_offset + record.compress_size
    if len({record.filename.casefold() for record in records}) < len(records):
        raise refused(file, "two records have one name")
    if end > file.nbytes:
        raise refused(file, "a record reaches beyond the file")
    return records


def _check_directory(file: MappedFile) -> None:
    at = file.nbytes - _END.size
    if at < 0 or file.bytes(0, 4).tobytes() != b"PK\3\4":
        raise refused(file, "it does not begin with a record")
    end_record = file.bytes(at, file.nbytes).tobytes()
    magic, disk, first, here, count, nbytes, begin, comment = _END.unpack(end_record)
    if magic != b"PK\5\6" or comment or (disk, here) != (first, count):
        raise refused(file, "it does not end with a directory; it is truncated, or has a comment")
    end = at
    if at >= _LOCATOR.size + _END64.size:
        locator = _LOCATOR.unpack(file.bytes(at - _LOCATOR.size, at).tobytes())
        if locator[0] == b"PK\6\7":
            end = at - _LOCATOR.size - _END64.size
            end64 = _END64.unpack(file.bytes(end, end + _END64.size).tobytes())
            count, nbytes, begin = end64[7:]
            if end64[0] != b"PK\6\6" or end64[6] != count or locator[2] != end:
                raise refused(file, "its directory contradicts itself")
    if count > MAX_RECORDS or nbytes > MAX_DIRECTORY_BYTES or begin + nbytes != end:
        raise refused(file, f"{count} records in {nbytes} bytes of directory (limit {MAX_RECORDS})")


def refused(file: MappedFile, reason: str) -> FormatError:
    """Return the error for an archive that is not read."""
    return FormatError(f"{file.path}: not a ZIP archive that is read: {reason}")
