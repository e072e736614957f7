"""The bytes of a call on a libp2p stream: frames of kind, length, data (SPEC 10).

The caller sends one CALL. The other side answers with CHUNK frames and one END, or with one ERROR, and leaves the
stream open until the caller closes it: what the daemon has not yet passed on is lost when the sending side closes
first. A stream without END was cut.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from dataclasses import dataclass
from typing import Annotated

from spes_p2p.net.limits import Flow, fair_timeout, pieces
from spes_p2p.net.transport import PAYLOAD_BYTES_MAX
from spes_protocols.codec import Matches, Size, decode, encode
from spes_protocols.errors import DETAIL_CHARACTERS_MAX, NetworkError, RemoteError, printable

PROTOCOL = "/spes/1"

_HEAD = struct.Struct(">BI")
_METHOD = r"[a-z][a-z0-9_/]{0,31}"
_FAILURE_BYTES_MAX = 4096


class Kind(enum.IntEnum):
    """What a frame is."""

    CALL = 1
    CHUNK = 2
    END = 3
    ERROR = 4


_BYTES_MAX = {
    Kind.CALL: PAYLOAD_BYTES_MAX + 33,
    Kind.CHUNK: PAYLOAD_BYTES_MAX,
    Kind.END: 0,
    Kind.ERROR: _FAILURE_BYTES_MAX,
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Data of an ERROR frame. `check` names what the answering side refused; empty: it could not answer."""

    check: Annotated[str, Matches(r"[a-z_]{0,32}", "the name of a check")] = ""
    detail: Annotated[str, Size(0, DETAIL_CHARACTERS_MAX)] = ""


def check_method(method: str) -> None:
    """Raise `ValueError` for a method name that the wire does not allow."""
    problem = Matches(_METHOD, "a method name of up to 32 characters a-z 0-9 _ /").problem(method)
    if problem is not None:
        raise ValueError(f"{method!r}: expected {problem}")


def frame_head(kind: Kind, data: bytes) -> bytes:
    """The five bytes before a frame's data. Raises `RemoteError` (size) for what the other side would refuse."""
    if len(data) > _BYTES_MAX[kind]:
        raise RemoteError("size", f"{len(data)} bytes where at most {_BYTES_MAX[kind]} are allowed")
    return _HEAD.pack(kind, len(data))


def call_data(method: str, payload: bytes) -> bytes:
    """Data of a CALL frame: length of the method's name, name, payload."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise RemoteError("size", f"a request of {len(payload)} bytes where at most {PAYLOAD_BYTES_MAX} are allowed")
    name = method.encode()
    return bytes((len(name),)) + name + payload


def split_call(data: bytes, peer: str) -> tuple[str, bytes]:
    """(method, payload) of a CALL frame's data. Raises `RemoteError` (decode)."""
    end = 1 + data[0] if data else 0
    name = data[1:end]
    if (
        not name
        or len(name) != end - 1
        or not name.isascii()
        or Matches(_METHOD, "").problem(name.decode()) is not None
    ):
        raise RemoteError("decode", "not a call", peer)
    return name.decode(), data[end:]


def failure_data(check: str, detail: str) -> bytes:
    """Data of an ERROR frame."""
    return encode(Failure(check=check, detail=detail[:DETAIL_CHARACTERS_MAX]))


def raise_failure(data: bytes, peer: str, method: str) -> None:
    """Raise at the caller what an ERROR frame says: `RemoteError`, or `NetworkError` where no check is named."""
    failure = decode(Failure, data, bytes_max=_FAILURE_BYTES_MAX, peer=peer)
    if failure.check:
        raise RemoteError(failure.check, failure.detail, peer)
    raise NetworkError(f"{peer} could not answer {method}: {printable(failure.detail, DETAIL_CHARACTERS_MAX)}")


async def read_frame(
    reader: asyncio.StreamReader,
    allowed: tuple[Kind, ...],
    peer: str,
    *,
    flow: Flow | None = None,
    piece_seconds: float | None = None,
) -> tuple[Kind, bytes]:
    """The next frame of a stream, read at the pace of `flow`; the caller sets the deadline over all of it.

    Raises `RemoteError` (decode, size) for anything but an allowed frame, `NetworkError` when the stream ends, and
    `TimeoutError` when its head or a piece of it does not come within `piece_seconds`.
    """
    flow = flow or Flow()
    try:
        async with fair_timeout(piece_seconds):
            number, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if number not in allowed:
            raise RemoteError("decode", f"a frame of kind {number} where none belongs", peer)
        kind = Kind(number)
        if length > _BYTES_MAX[kind]:
            raise RemoteError("size", f"a frame of {length} bytes where at most {_BYTES_MAX[kind]} are allowed", peer)
        lane = flow.lane(length)
        data = []
        for begin, end in pieces(length):
            await flow.take(end - begin, lane)  # what is not read yet holds the sender back
            async with fair_timeout(piece_seconds):
                data.append(await reader.readexactly(end - begin))
        return kind, b"".join(data)
    except TimeoutError:  # an OSError, to Python
        raise
    except (asyncio.IncompleteReadError, OSError):
        raise NetworkError(f"the connection to {peer} was cut") from None
