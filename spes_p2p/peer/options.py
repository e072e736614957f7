"""What the person who starts a peer may choose; everything about the run itself is in its manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.net.limits import UNLIMITED, Schedule
from spes_p2p.net.relayed import RelayQuotas
from spes_p2p.peer.trainer_link import TrainerOptions

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options of one peer. `groups` None: as many as the run allows one peer; 0: stand by.

    `role` is what the peer tells others: "volunteer", "archive" (keeps every blob) or "bootstrap" (follows the ledger
    alone). `relay`: relay for others, who have `relay_quotas` there. `port_map`: a router may be asked to pass a port
    on. `max_up` and `max_down` limit what is sent to and received from other peers.
    """

    home: Path
    peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    role: str = "volunteer"
    groups: int | None = None
    trains: bool = True
    relay: bool = False
    relay_quotas: RelayQuotas = field(default_factory=RelayQuotas)
    port_map: bool = True
    max_up: Schedule = UNLIMITED
    max_down: Schedule = UNLIMITED
    disk_bytes_max: int = 100 * GIB
    snapshot_rounds: int = 10
    rounds_max: int | None = None
    start_key: Path | None = None
    worker_threads: int = 1
    trainer: TrainerOptions = field(default_factory=TrainerOptions)

    @property
    def is_reachable(self) -> bool:
        """Whether others are known to get here."""
        return self.role == "bootstrap" or self.relay or bool(self.announce)

    @property
    def finds_way(self) -> bool:
        """Whether the peer is to find out by itself how others reach it."""
        return not self.is_reachable and not self.relays

    @property
    def computes(self) -> bool:
        """Whether this peer holds blobs and states."""
        return self.role != "bootstrap"
