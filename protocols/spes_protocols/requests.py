"""What one peer asks of another: requests and replies of the peer-to-peer methods (SPEC 3.3).

They carry no signature of their own. What they bring is either signed itself (manifest, ledger, presences) or checked
against a digest that the ledger names (blobs, snapshots).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spes_protocols.codec import OneOf, Range, Size
from spes_protocols.types import PEERS_MAX, Count, Digest, Envelope, Small

HELLO = "spes/1/hello"
MANIFEST = "spes/1/manifest"
PUSH = "spes/1/push"
CHAIN = "spes/1/chain"
SNAPSHOTS = "spes/1/snapshots"
INDEX = "spes/1/index"
LEAVES = "spes/1/leaves"
CLAIMS = "spes/1/claims"
DIAL_BACK = "spes/1/dial_back"
HOLDINGS = "spes/1/holdings"
RELAY = "spes/1/relay"

PRESENCES_MAX = 64
"""Presences in one reply to HELLO."""

CHAIN_ENTRIES_MAX = 256
"""Records in one reply to CHAIN."""

KNOWN_MAX = 64
"""Heads that a CHAIN request names."""

CHAIN_BYTES_MAX = 2 * 1024 * 1024
"""A reply to CHAIN ends before it grows beyond this; the first record of it is always whole."""

RESET_BYTES_MAX = 256 * 1024
"""The envelope of a reset: with a table of 1024 members it has about half of this."""

SNAPSHOTS_MAX = 1024
"""Rounds in one reply to SNAPSHOTS."""

LEAVES_MAX = 32
"""Leaves in one LEAVES request."""

DIAL_PORTS_MAX = 4
"""Ports in one DIAL_BACK request."""

HOLDINGS_MAX = 64
"""Blobs in one HOLDINGS request."""

SHARE_WHOLE = 255
"""What `HoldingsReply` says of a blob that is there."""


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    """Presences known to the peer, its own first: how addresses spread without the DHT."""

    presences: Annotated[tuple[Envelope, ...], Size(1, PRESENCES_MAX)]


@dataclass(frozen=True, kw_only=True)
class ClaimsReply:
    """Claims the peer has seen that no commit carries yet."""

    claims: Annotated[tuple[Envelope, ...], Size(0, PEERS_MAX)]


@dataclass(frozen=True, kw_only=True)
class ChainRequest:
    """Records of the ledger after the first of these heads that the peer has too; the asker's, newest first."""

    known: Annotated[tuple[Digest, ...], Size(1, KNOWN_MAX)]


@dataclass(frozen=True, kw_only=True)
class ChainEntry:
    """One record of the ledger: an opening's envelope or a commit's canonical bytes."""

    kind: Annotated[str, OneOf(("start", "reset", "commit"))]
    data: Annotated[bytes, Size(1, 3 * 1024 * 1024 - 4096)]


@dataclass(frozen=True, kw_only=True)
class ChainReply:
    """Consecutive records, the first at position `first`.

    `length` is how many the peer has in all. `reset` is the envelope of its last reset if that is at `first` or later,
    else empty: whoever asks may have to read on to it to know that this ledger goes before its own.
    """

    first: Count
    reset: Annotated[bytes, Size(0, RESET_BYTES_MAX)]
    entries: Annotated[tuple[ChainEntry, ...], Size(0, CHAIN_ENTRIES_MAX)]
    length: Count


@dataclass(frozen=True, kw_only=True)
class SnapshotsReply:
    """Rounds whose global state the peer can serve, ascending."""

    rounds: Annotated[tuple[Count, ...], Size(0, SNAPSHOTS_MAX)]


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """The `SnapshotIndex` of a round."""

    round: Count


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A leaf of a snapshot by tensor number and leaf number."""

    tensor: Small
    leaf: Small


@dataclass(frozen=True, kw_only=True)
class LeavesRequest:
    """Leaves of a round's snapshot; the reply streams their bytes one after the other."""

    round: Count
    leaves: Annotated[tuple[Leaf, ...], Size(1, LEAVES_MAX)]


Port = Annotated[int, Range(1, 65535)]


@dataclass(frozen=True, kw_only=True)
class DialBackRequest:
    """TCP ports that the asker listens on, to be dialled at the address its connection comes from."""

    ports: Annotated[tuple[Port, ...], Size(1, DIAL_PORTS_MAX)]


@dataclass(frozen=True, kw_only=True)
class DialBackReply:
    """`observed` is the other end of the asker's direct connection, `/ip4/../tcp/..` or `/ip6/..`.

    `open` are those of the ports asked for, and of the observed one, where libp2p answered.
    """

    observed: Annotated[str, Size(1, 300)]
    open: Annotated[tuple[Port, ...], Size(0, DIAL_PORTS_MAX + 1)]


@dataclass(frozen=True, kw_only=True)
class HoldingsRequest:
    """Which of these blobs the peer holds."""

    blobs: Annotated[tuple[Digest, ...], Size(1, HOLDINGS_MAX)]


@dataclass(frozen=True, kw_only=True)
class HoldingsReply:
    """A byte for each blob asked for: 0 not there, 255 there, 1 to 254 on its way, more where more has come."""

    shares: Annotated[bytes, Size(1, HOLDINGS_MAX)]


@dataclass(frozen=True, kw_only=True)
class RelayReply:
    """What a relay asks of those who send through it: at most `rate` bytes per second in streams; 0: no limit."""

    rate: Count
