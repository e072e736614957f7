"""Whether a file on disk was written by another version of this program: then it is not damaged, and not to be mended.

A signature tells. Damaged bytes do not carry a good one, so an envelope that does is as its signer wrote it; and if
what it holds is still no record of this version, a program wrote it that knows other records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgpack

from spes_p2p.crypto.envelope import KINDS, signed_bytes
from spes_p2p.crypto.keys import public_key_of, verify
from spes_protocols.codec import decode
from spes_protocols.errors import RemoteError, UserError
from spes_protocols.messages import Sealed
from spes_protocols.types import ENVELOPE_BYTES_MAX


class OtherVersionError(UserError):
    """A file that another version of this program wrote. Nothing is wrong with it, and this version cannot read it."""

    def __init__(self, path: object, which: str) -> None:
        """`which` version: "an older", "a newer", or "another"."""
        what_to_do = (
            "update this one"
            if which == "a newer"
            else "go on with that version, or use another directory for a run of this one"
        )
        super().__init__(f"{path} was written by {which} version of this program; it is not damaged: {what_to_do}")


def other_version(data: bytes) -> str | None:
    """Which version wrote well-signed envelopes that this one cannot read: "an older" or "another"; else None.

    `data` is an envelope, or a commit with envelopes in it.
    """
    return next(filter(None, map(_version_of, itertools.chain([data], _leaves(data)))), None)


def _leaves(data: bytes) -> Iterator[bytes]:
    """The byte strings inside of a record."""
    try:
        plain = [msgpack.unpackb(data, raw=False, strict_map_key=True)]
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return
    while plain:
        value = plain.pop()
        if isinstance(value, bytes):
            yield value
        elif isinstance(value, dict):
            plain += value.values()
        elif isinstance(value, list):
            plain += value


def _version_of(data: bytes) -> str | None:
    try:
        sealed = decode(Sealed, data, bytes_max=ENVELOPE_BYTES_MAX)
        problem = _problem(sealed)
        signed = signed_bytes(sealed.kind, sealed.payload)
        if problem is None or not verify(public_key_of(sealed.signer), sealed.signature, signed):
            return None
    except RemoteError:
        return None
    return problem


def _problem(sealed: Sealed) -> str | None:
    """None for a record of this version. One that only lacks keys, which then have their defaults, is older."""
    kind = KINDS.get(sealed.kind)
    if kind is None:
        return "another"
    try:
        decode(kind, sealed.payload, bytes_max=ENVELOPE_BYTES_MAX)
    except RemoteError as error:
        return "an older" if "not in canonical form" in error.detail else "another"
    return None
