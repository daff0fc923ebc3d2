"""Bytes of a file, unpacked while they are read, with a bound on how much comes out of how little.

    with open_unpacked(piece_file, "gz", max_ratio=200) as file: file.read(4096)

What is wrong with a packed file is a `BrokenInput`, told where documents are told.
"""

from __future__ import annotations

import io
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from ridgeline.data.corpus.units.unit import Packing

BUFFER_BYTES = 1 << 20
FREE_BYTES = 16 << 20  # that any file may unpack to, however small it is


class BrokenInput(Exception):  # noqa: N818 - becomes the reason of a quarantined document
    """A file that cannot be read on."""


class BombError(BrokenInput):
    """Of which nothing is read."""


def open_unpacked(path: str | Path, packing: Packing, max_ratio: int) -> BinaryIO:
    if not packing:
        return open(path, "rb", buffering=BUFFER_BYTES)
    return io.BufferedReader(_Unpacker(path, packing, max_ratio), BUFFER_BYTES)


def unpacked_bytes(
    path: str | Path, packing: Packing, max_ratio: int
) -> tuple[int, BrokenInput | None]:
    """How many a packed file has, and what is wrong behind them. BombError for a bomb."""
    size = 0
    with closing(_Unpacker(path, packing, max_ratio)) as file:
        try:
            while block := file.read(BUFFER_BYTES):
                size += len(block)
        except BombError:
            raise
        except BrokenInput as error:
            return size, error
    return size, None


def packing_ratio(path: str | Path, packing: Packing, max_ratio: int, num_bytes: int) -> float:
    """Unpacked bytes for each of the file's, of its first `num_bytes`."""
    unpacker = _Unpacker(path, packing, max_ratio)
    with io.BufferedReader(unpacker, BUFFER_BYTES) as file:
        size = len(file.read(num_bytes))
        return size / max(1, unpacker.num_packed)


class _Unpacker(io.RawIOBase):
    def __init__(self, path: str | Path, packing: Packing, max_ratio: int) -> None:
        self._file = open(path, "rb", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed by close
        self._stream = _GzipStream(self._file) if packing == "gz" else _zstd_stream(self._file)
        self._ratio, self._num_out = max_ratio, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except (zlib.error, OSError, EOFError) as error:
            raise BrokenInput(f"broken at unpacked byte {self._num_out}: {error}") from None
        self._num_out += len(data)
        if self._num_out > FREE_BYTES + self._ratio * self._file.tell():
            raise BombError(
                f"unpacks to more than {self._ratio} times its size (max_ratio): a bomb?"
            )
        view[: len(data)] = data
        return len(data)

    @property
    def num_packed(self) -> int:
        """Bytes of the file that were taken so far."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


class _GzipStream:
    """Members one behind the other. Python's own reads ahead without a bound on what comes out."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, b""
        self._member = zlib.decompressobj(31)
        self._is_begun = False

    def read(self, size: int) -> bytes:
        while True:
            packed = self._rest or self._file.read(1 << 16)
            if not packed:
                if self._is_begun:
                    raise EOFError("the file ends too early")
                return b""
            self._is_begun = True
            data = self._member.decompress(packed, size)
            self._rest = self._member.unconsumed_tail
            if self._member.eof:
                self._rest = self._member.unused_data.lstrip(b"\0")  # some writers pad
                self._member, self._is_begun = zlib.decompressobj(31), False
            if data:
                return data


def _zstd_stream(file: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
