"""What `spes doctor` looks at and finds, as plain facts without a judgement.

`doctor_probes` and `doctor_local` fill these in as answers come, so that a deadline leaves what was found until then;
`doctor_judge` makes rows of them. What is None or empty was not found out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from spes_p2p.net.reachability import Answer
    from spes_protocols.manifest import Manifest

GIVEN = "given"
REMEMBERED = "remembered"
DIRECT = "direct"
RELAYED = "relayed"
Flag = tuple[str, str | None]
"""A flag of the command line and its value, None for one that takes none."""

PEER, OWN, RELAY = "peer", "own", "relay"


@dataclass(kw_only=True)
class AddressFound:
    """One address of `--peer`, or one that the home remembers. Times in seconds.

    `problem`: it is no address. `hosts`: what its host name means. `run_problem`: the peer gave no manifest, and why;
    `speaks` is False where that is for want of this protocol. `other_version`: who wrote the manifest that it gave.
    `greets`: whether what took the plain TCP connection said what libp2p says first.
    """

    text: str
    source: str
    problem: str = ""
    peer: str = ""
    named_run: bytes | None = None
    is_relayed: bool = False
    is_own: bool = False
    hosts: tuple[str, ...] = ()
    resolve_problem: str = ""
    tcp_seconds: float | None = None
    tcp_problem: str = ""
    greets: bool | None = None
    connect_seconds: float | None = None
    connect_problem: str = ""
    run_id: bytes | None = None
    run_problem: str = ""
    speaks: bool | None = None
    other_version: str = ""


@dataclass(kw_only=True)
class PeerFound:
    """Another peer of the run. `path` is "direct", "relayed", or empty without a connection.

    `calls`: seconds of small calls; `clock_offset`: seconds that its clock is ahead of this machine's.
    `home_path`: how the peer of this home is connected to it, None where none runs.
    `round`: its ledger stands there. `fetched_bytes` came in `fetched_seconds` from `fetched_at` on, by a clock of any
    beginning; `fetch_note` says why nothing did. `sent_bytes` and the others are the same of what was sent to it.
    """

    peer: str
    role: str = ""
    round: int = 0
    addresses: tuple[str, ...] = ()
    is_member: bool = False
    path: str = ""
    home_path: str | None = None
    calls: list[float] = field(default_factory=list)
    problem: str = ""
    clock_offset: float | None = None
    fetched_bytes: int = 0
    fetched_seconds: float = 0.0
    fetched_at: float = 0.0
    fetch_note: str = ""
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    sent_at: float = 0.0
    send_note: str = ""


def line_rate(peers: Iterable[PeerFound], way: Literal["fetched", "sent"]) -> float | None:
    """Bytes per second of all transfers one way while there was any; None where there was none."""
    moves = [(getattr(p, f"{way}_at"), getattr(p, f"{way}_seconds"), getattr(p, f"{way}_bytes")) for p in peers]
    busy, until = 0.0, -math.inf
    for began, seconds, _ in sorted(move for move in moves if move[2]):
        ended = max(until, began + seconds)
        busy += ended - max(until, began)
        until = ended
    return sum(count for _, _, count in moves) / busy if busy > 0 else None


@dataclass(kw_only=True)
class RunningFound:
    """The peer that holds this home: its process (0: unknown) and what its control socket said.

    `addresses` as it tells them; `paths` are its connections, "" for a member without one. `is_silent`: the socket is
    there and nobody answers; otherwise without `answered` there is no socket yet. `max_up` and `max_down` are the
    limits of its line that are in force, bytes per second.
    """

    pid: int
    answered: bool = False
    is_silent: bool = False
    peer: str = ""
    phase: str = ""
    round: int = 0
    trainer: str = ""
    waiting: str = ""
    last_error: str = ""
    addresses: tuple[str, ...] = ()
    paths: dict[str, str] = field(default_factory=dict)
    max_up: float | None = None
    max_down: float | None = None
    members: tuple[str, ...] = ()


@dataclass(kw_only=True)
class HomeFound:
    """The home and the run in it. Problems are errors of ours in words. `is_file`: it is no directory.

    `program`: which one works here, for a command line. `network_problem`: what is remembered cannot be read.
    `identity` and `ledger`: "" not looked at, "none", "good" or "bad". `has_worked`: a peer has been here, so that a
    missing identity is a lost one. `ledger_lost`: none, where this peer has taken part. `backup_day` and
    `backup_fingerprint` are those of the last backup that is noted; `backup_problem`: the note cannot be read.
    """

    exists: bool = False
    is_file: bool = False
    problem: str = ""
    program: str = "spes-join"
    network_problem: str = ""
    peer: str = ""
    identity: str = ""
    identity_problem: str = ""
    backup_day: str = ""
    backup_fingerprint: str = ""
    backup_problem: str = ""
    has_worked: bool = False
    pinned: bytes | None = None
    run_problem: str = ""
    ledger: str = ""
    ledger_records: int = 0
    ledger_problem: str = ""
    ledger_lost: bool = False
    running: RunningFound | None = None


@dataclass(kw_only=True)
class PortFound:
    """An address to listen on. `asked`: by `--listen`, else it is the one of the last time."""

    address: str
    port: int = 0
    asked: bool = True
    is_malformed: bool = False
    in_use: bool = False
    problem: str = ""


@dataclass(kw_only=True)
class MachineFound:
    """This machine. Bytes; `files_soft` and `files_hard` are the limits of open files, -1: none.

    `disk_needed` is the least that the run takes, `disk_used` what is here of it, `disk_quota` what `--disk` allows.
    `fit` are the lines that `spes-join` says of what it chooses, `fit_problem` why it would not.
    """

    files_soft: int | None = None
    files_hard: int | None = None
    disk_free: int | None = None
    disk_used: int = 0
    disk_needed: int | None = None
    disk_quota: int = 0
    disk_cache: int = 0
    place: str = ""
    fit: tuple[str, ...] = ()
    fit_problem: str = ""


@dataclass(kw_only=True)
class RelayFound:
    """A relay that was tried. `asked`: by `--relay`. `seconds`: until a connection through it came up."""

    address: str
    asked: bool
    seconds: float | None = None
    problem: str = ""


@dataclass(kw_only=True)
class NetworkFound:
    """What the probes' own network daemon saw. `local`: the address that this machine has towards the internet.

    `addresses` are hosts without ports of the probing node, `observed` those of them that no interface here has; it
    listens on `ports`, and its router passes on `mapped` as it was asked to. `dialled_back` is what peers say who were
    asked to open a connection to it. `max_up` and `max_down` are the limits, in bytes per second, that the probes kept
    to beyond the LAN.
    """

    daemon_seconds: float | None = None
    daemon_problem: str = ""
    local: str = ""
    is_local_known: bool = False
    addresses: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    mapped: tuple[int, ...] = ()
    dialled_back: list[Answer] = field(default_factory=list)
    relays: list[RelayFound] = field(default_factory=list)
    max_up: float | None = None
    max_down: float | None = None


@dataclass(frozen=True, kw_only=True)
class DialFound:
    """An address as py-libp2p found it. `kind`: PEER, OWN (this machine's probing daemon) or RELAY (a node behind one).

    `text` is what the address or relay is called elsewhere. The peer saw `local_port` of this machine at `observed`.
    """

    kind: str
    text: str
    seconds: float | None = None
    problem: str = ""
    protocols: tuple[str, ...] = ()
    observed: str = ""
    local_port: int = 0


@dataclass(kw_only=True)
class SecondFound:
    """The second opinion, of another implementation of libp2p. `problem`: why it gave none."""

    is_installed: bool = True
    problem: str = ""
    version: str = ""
    dials: list[DialFound] = field(default_factory=list)


@dataclass(kw_only=True)
class Findings:
    """Everything. `run_id` and `manifest` of the run that is expected, or that the first peer to answer is in.

    `named_runs`: those that the addresses name. `left_out` counts addresses and peers that were not tried. `flags` are
    those that the check was given beside --dir, --peer and --json, as (name, value): the next command has them too.
    """

    home: Path
    is_default_home: bool
    flags: tuple[Flag, ...] = ()
    program: str = ""
    python: str = ""
    protocol: str = ""
    home_found: HomeFound = field(default_factory=HomeFound)
    machine: MachineFound = field(default_factory=MachineFound)
    network: NetworkFound = field(default_factory=NetworkFound)
    second: SecondFound = field(default_factory=SecondFound)
    ports: list[PortFound] = field(default_factory=list)
    addresses: list[AddressFound] = field(default_factory=list)
    peers: dict[str, PeerFound] = field(default_factory=dict)
    named_runs: tuple[bytes, ...] = ()
    run_id: bytes | None = None
    run_name: str = ""
    organizer: str = ""
    manifest: Manifest | None = None
    addresses_left_out: int = 0
    peers_left_out: int = 0
    seconds: float = 0.0

    @property
    def running(self) -> RunningFound | None:
        """The peer that holds this home."""
        return self.home_found.running
