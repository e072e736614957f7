"""Rows of a SQLite file whose trees are broken, read from the pages that are still there (SQLite's file format).

A file that was cut off, or lost the page that leads to others, is refused by SQLite as a whole, though most rows still
stand in it. Here every page that looks like a table's leaf is read by itself. Which table a row is of is for the caller
to see from its values, and so is whether it is still in force: a page that is free now may hold old rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

Value = int | float | str | bytes | None
Row = tuple[Value, ...]

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_LEAF = 0x0D
_PAGE_BYTES = 4096
"""What new files have; for a file whose header does not say it."""

_COLUMNS_MAX = 32
_INT_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_CONSTANTS: dict[int, Value] = {0: None, 8: 0, 9: 1}


def rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(rowid, values) of every row that can be read whole, in the order of the pages. Raises `OSError`."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        page_bytes, unused = _sizes(head)
        count = path.stat().st_size // page_bytes
        for number in range(1, count + 1):
            yield from _Page(file, number, page_bytes, unused, count).rows()


def _sizes(head: bytes) -> tuple[int, int]:
    """(bytes of a page, bytes at the end of each that hold nothing)."""
    if len(head) == _HEADER_BYTES and head.startswith(_MAGIC):
        (size,) = struct.unpack(">H", head[16:18])
        size = 65536 if size == 1 else size
        if size >= 512 and size & (size - 1) == 0 and head[20] <= size - 480:
            return size, head[20]
    return _PAGE_BYTES, 0


class _DamagedError(Exception):
    """A row that is not there whole."""


class _Page:
    """One page, read as the leaf of a table."""

    def __init__(self, file: BinaryIO, number: int, page_bytes: int, unused: int, count: int) -> None:
        self._file = file
        self._page_bytes = page_bytes
        self._usable = page_bytes - unused
        self._count = count
        self._begin = _HEADER_BYTES if number == 1 else 0
        self._data = self._read(number)

    def _read(self, number: int) -> bytes:
        if not 1 <= number <= self._count:
            raise _DamagedError
        self._file.seek((number - 1) * self._page_bytes)
        return self._file.read(self._page_bytes)[: self._usable]

    def rows(self) -> Iterator[tuple[int, Row]]:
        """The rows that can be read; none if this is another kind of page."""
        data, begin = self._data, self._begin
        if data[begin] != _LEAF:
            return
        (cells,) = struct.unpack(">H", data[begin + 3 : begin + 5])
        pointers = data[begin + 8 : begin + 8 + 2 * cells]
        if len(pointers) < 2 * cells:
            return
        for (at,) in struct.iter_unpack(">H", pointers):
            try:
                yield self._cell(at)
            except (_DamagedError, IndexError, UnicodeDecodeError):
                continue

    def _cell(self, at: int) -> tuple[int, Row]:
        size, at = _varint(self._data, at)
        rowid, at = _varint(self._data, at)
        return rowid, _values(self._payload(size, at))

    def _payload(self, size: int, at: int) -> bytes:
        """What a cell holds: all of it here, or the beginning here and the rest in a chain of other pages."""
        usable = self._usable
        if size <= usable - 35:
            return _part(self._data, at, size)
        if size > self._count * usable:
            raise _DamagedError
        least = (usable - 12) * 32 // 255 - 23
        here = least + (size - least) % (usable - 4)
        here = here if here <= usable - 35 else least
        payload = bytearray(_part(self._data, at, here))
        following = int.from_bytes(_part(self._data, at + here, 4), "big")
        while len(payload) < size:  # ends: each page brings something, and `size` is bounded
            data = self._read(following)
            payload += data[4 : 4 + size - len(payload)]
            following = int.from_bytes(data[:4], "big")
        return bytes(payload)


def _part(data: bytes, at: int, size: int) -> bytes:
    part = data[at : at + size]
    if len(part) < size:
        raise _DamagedError
    return part


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of at most nine bytes, where it ends)."""
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9


def _values(payload: bytes) -> Row:
    end, at = _varint(payload, 0)
    types = []
    while at < end:
        kind, at = _varint(payload, at)
        types.append(kind)
    if at != end or len(types) > _COLUMNS_MAX:
        raise _DamagedError
    values: list[Value] = []
    for kind in types:
        value, at = _value(payload, kind, at)
        values.append(value)
    if at != len(payload):
        raise _DamagedError
    return tuple(values)


def _value(payload: bytes, kind: int, at: int) -> tuple[Value, int]:
    """(the value of a serial type, where it ends)."""
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind in _INT_BYTES:
        size = _INT_BYTES[kind]
        return int.from_bytes(_part(payload, at, size), "big", signed=True), at + size
    if kind == 7:
        return struct.unpack(">d", _part(payload, at, 8))[0], at + 8
    if kind < 12:
        raise _DamagedError
    size = (kind - 12) // 2
    data = _part(payload, at, size)
    return data.decode() if kind % 2 else data, at + size
