"""Field types that records share, each with its bounds (SPEC 1.5)."""

from __future__ import annotations

from typing import Annotated

from spes_protocols.codec import Matches, Range, Size, SizeOneOf

Digest = Annotated[bytes, Size(32, 32)]
"""A SHA-256 digest."""

DigestOrNil = Annotated[bytes, SizeOneOf((0, 32))]
"""A SHA-256 digest, or no bytes for "none"."""

PEER_ID = Matches(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}", "a peer id, 12D3KooW and 44 base58 characters")

PeerId = Annotated[str, PEER_ID]
"""libp2p peer id of an Ed25519 key, which embeds the public key."""

Count = Annotated[int, Range(0, 2**53)]
"""A non-negative integer that float64 holds exactly."""

Small = Annotated[int, Range(0, 2**20)]
"""A small non-negative integer: a view, a round's steps, a group's index."""

ENVELOPE_BYTES_MAX = 2 * 1024 * 1024
"""No envelope is larger, alone or inside another record (SPEC 2.1)."""

Envelope = Annotated[bytes, Size(1, ENVELOPE_BYTES_MAX)]
"""The bytes of a signed record, opened with `spes_p2p.crypto.envelope`."""

PEERS_MAX = 4096
GROUPS_MAX = 1024

LEAF_BYTES = 4 * 1024 * 1024
"""A tensor is hashed and sent in pieces of this size (SPEC 8.2)."""
