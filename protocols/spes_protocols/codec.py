"""Bytes <-> records: canonical msgpack for frozen dataclasses, with every size bounded (SPEC 1).

A record is a frozen dataclass whose field types say everything that is checked: plain types, `tuple[T, ...]`, nested
records, and `Annotated[T, constraint...]`. The same walk validates a TOML manifest and a peer's bytes, so both get the
same errors: the dotted key, the value found, the range allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from spes_protocols.errors import RemoteError, SchemaError

T = TypeVar("T")

RECORD_BYTES_MAX = 4 * 1024 * 1024
"""No encoded record is larger; a transport frame holds one record (SPEC 1.3)."""

_ITEMS_MAX = 1 << 20


@dataclass(frozen=True)
class Range:
    """An inclusive numeric range."""

    low: float
    high: float

    def problem(self, value: Any) -> str | None:
        """What is allowed, if `value` is not."""
        return None if self.low <= value <= self.high else f"a number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Size:
    """An inclusive range for the length of a string, byte string or tuple."""

    low: int
    high: int

    def problem(self, value: Any) -> str | None:
        """What is allowed, if `value` is not."""
        if self.low <= len(value) <= self.high:
            return None
        if self.low == self.high:
            return f"a length of {self.low}"
        return f"a length from {self.low} to {self.high}"


@dataclass(frozen=True)
class SizeOneOf:
    """A closed list of allowed lengths."""

    sizes: tuple[int, ...]

    def problem(self, value: Any) -> str | None:
        """The allowed lengths in words, None if `value` has one of them."""
        return None if len(value) in self.sizes else "a length of " + " or ".join(map(str, self.sizes))


@dataclass(frozen=True)
class OneOf:
    """A closed list of allowed values."""

    values: tuple[Any, ...]

    def problem(self, value: Any) -> str | None:
        """What is allowed, if `value` is not."""
        if value in self.values:
            return None
        return "one of " + ", ".join(str(v) for v in self.values)


@dataclass(frozen=True)
class Matches:
    """A string that matches `pattern` whole; `what` is the description a person reads."""

    pattern: str
    what: str

    def problem(self, value: Any) -> str | None:
        """What is allowed, if `value` is not."""
        return None if re.fullmatch(self.pattern, value) else self.what


def sha256(data: bytes) -> bytes:
    """The project's digest: SHA-256, 32 bytes (SPEC 1.4)."""
    return hashlib.sha256(data).digest()


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def to_plain(value: Any) -> Any:
    """A record as nested dicts, lists and scalars, as msgpack and TOML know them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], value: Any, path: str = "") -> T:
    """Build the record `cls` from nested dicts, checking each field's type and constraints.

    Missing keys take the field's default. Raises `SchemaError` naming the first offending key.
    """
    if not isinstance(value, dict):
        raise SchemaError(path, value, "a table of keys")
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for key in value:
        if key not in hints:
            known = ", ".join(sorted(f.name for f in fields))
            raise SchemaError(_join(path, str(key)), value[key], f"no such key here; known keys: {known}")
    arguments: dict[str, Any] = {}
    for field in fields:
        at = _join(path, field.name)
        if field.name in value:
            arguments[field.name] = _convert(hints[field.name], value[field.name], at)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SchemaError(at, None, "a value; the key is missing")
    try:
        return cls(**arguments)
    except SchemaError as error:
        raise SchemaError(_join(path, error.path), error.value, error.expected) from None


_KINDS = {int: "a whole number", float: "a number", str: "text", bytes: "bytes", bool: "true or false"}
"""How people call the types of values."""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


def _convert(hint: Any, value: Any, path: str) -> Any:
    if typing.get_origin(hint) is typing.Annotated:
        inner, *constraints = typing.get_args(hint)
        if isinstance(value, list | tuple) and typing.get_origin(inner) is tuple:
            _check_length(value, constraints, path)
        result = _convert(inner, value, path)
        for constraint in constraints:
            problem = constraint.problem(result)
            if problem is not None:
                raise SchemaError(path, value, problem)
        return result
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise SchemaError(path, value, "a list")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _convert(inner, value, path)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, path)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise SchemaError(path, value, "a number that a float64 can hold") from None
    if type(value) is not hint:
        raise SchemaError(path, value, _KINDS.get(hint, f"a value of type {getattr(hint, '__name__', hint)}"))
    if hint is float and not math.isfinite(value):
        raise SchemaError(path, value, "a finite number")
    return value


def _check_length(items: list[Any] | tuple[Any, ...], constraints: list[Any], path: str) -> None:
    """Items counted before any of them is looked at: a record may hold a million where four thousand are allowed."""
    for constraint in constraints:
        problem = constraint.problem(items) if isinstance(constraint, Size) else None
        if problem is not None:
            raise SchemaError(path, items[:3], f"{problem}, found {len(items)}")


def pack(plain: Any) -> bytes:
    """Canonical msgpack of nested dicts, lists and scalars: keys sorted, shortest integers, float64 (SPEC 1.1)."""
    packed: bytes = msgpack.packb(_sorted(plain), use_bin_type=True)
    return packed


def _sorted(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {key: _sorted(plain[key]) for key in sorted(plain)}
    if isinstance(plain, list | tuple):
        return [_sorted(item) for item in plain]
    return plain


def encode(record: Any) -> bytes:
    """Canonical bytes of a record (SPEC 1.1)."""
    packed: bytes = msgpack.packb(_canonical(record), use_bin_type=True)
    return packed


def _canonical(value: Any) -> Any:
    """A record as `pack` would order it, in one walk: every vote and header is encoded, by everybody."""
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    names = _sorted_names(type(value))  # type: ignore[arg-type]
    return value if names is None else {name: _canonical(getattr(value, name)) for name in names}


@functools.cache
def _sorted_names(cls: type) -> tuple[str, ...] | None:
    """A record's fields in ascending order, None for any other type."""
    return tuple(sorted(f.name for f in dataclasses.fields(cls))) if dataclasses.is_dataclass(cls) else None


def digest(record: Any) -> bytes:
    """SHA-256 of a record's canonical bytes (SPEC 1.4)."""
    return sha256(encode(record))


def decode(cls: type[T], data: bytes, *, bytes_max: int = RECORD_BYTES_MAX, peer: str = "") -> T:
    """Parse a record that came from outside; only its canonical encoding is accepted (SPEC 1.2).

    Raises `RemoteError` with check `size` or `decode`.
    """
    if len(data) > bytes_max:
        raise RemoteError("size", f"{len(data)} bytes where at most {bytes_max} are allowed", peer)
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=bytes_max,
            max_bin_len=bytes_max,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise RemoteError("decode", f"not a msgpack record: {error}", peer) from None
    try:
        record = from_plain(cls, plain)
    except SchemaError as error:
        raise RemoteError("decode", f"{cls.__name__}: {error}", peer) from None
    if encode(record) != data:
        raise RemoteError("decode", f"{cls.__name__}: not in canonical form", peer)
    return record
