"""A peer's figures as text that Prometheus reads (exposition format 0.0.4).

    exporter.py --Snapshot--> page --HTTP--> Prometheus

Pure. What is not known is left out instead of told as 0. Nothing that other peers can choose becomes a label, apart
from the run's own name, so that nobody can make series here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One peer at one moment. Times are Unix seconds, amounts bytes; None or empty is "not known".

    `members` counts the table's rows by "owner" and "standby", `peers` those heard of lately by what they call
    themselves, `links` the open ones by "direct" and "relayed", `rounds` the commits that this process saw, by how far
    they can be relied on (SPEC 5.12), `disk` the bytes by what they hold. `checks` is the self-check's last verdicts.
    """

    version: str
    run_id: str
    run_name: str
    peer_id: str
    role: str
    round: int
    ready: bool
    halted: bool
    stalled: bool
    ended: bool
    tokens: int
    commit_age_seconds: float
    members: Mapping[str, int]
    groups_owned: int
    groups: int
    peers: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    daemon_restarts: int
    started: float
    links: Mapping[str, int] | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    dht_records: int | None = None
    disk: Mapping[str, int] = field(default_factory=dict)
    disk_free: int | None = None
    clock_offset_seconds: float | None = None
    checks: Mapping[str, bool] = field(default_factory=dict)
    checked: float | None = None
    resident_bytes: int | None = None
    open_files: int | None = None


@dataclass(frozen=True)
class Family:
    """A metric: its name, kind ("gauge" or "counter"), what it means, and its samples."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[Labels, float], ...]


def page(snapshot: Snapshot) -> str:
    """The whole text of a scrape."""
    return "".join(_text(family) for family in families(snapshot) if family.samples)


def families(of: Snapshot) -> Iterator[Family]:
    """Every metric of a snapshot, those without a known value with no samples."""
    yield from _run(of)
    yield from _network(of)
    yield from _machine(of)


def _run(of: Snapshot) -> Iterator[Family]:
    info = {"run_id": of.run_id, "run": of.run_name, "peer": of.peer_id, "role": of.role}
    yield _gauge("spes_build_info", "Version of the program.", 1, {"version": of.version})
    yield _gauge("spes_run_info", "The run that this peer follows, and who it is there.", 1, info)
    yield _gauge("spes_ready", "1 when this peer has come up to date and takes part.", of.ready)
    yield _gauge("spes_round", "Round that follows this peer's ledger.", of.round)
    yield _gauge("spes_halted", "1 when no state root can reach a quorum: the organizer is needed.", of.halted)
    yield _gauge("spes_stalled", "1 when the round has not closed for the run's stall_seconds.", of.stalled)
    yield _gauge("spes_ended", "1 when the organizer has ended the run.", of.ended)
    yield _gauge(
        "spes_last_commit_age_seconds",
        "Seconds since this peer's ledger took in its last commit; since the process began where none has come.",
        of.commit_age_seconds,
    )
    yield _by("spes_rounds_total", "counter", "Commits since this process is up to date.", "strength", of.rounds)
    yield _gauge("spes_tokens", "Tokens of all contributions of the run.", of.tokens)
    yield _by("spes_members", "gauge", "Rows of the member table.", "role", of.members)
    yield _gauge("spes_groups", "Expert groups of the run.", of.groups)
    yield _gauge("spes_groups_owned", "Expert groups that somebody owns.", of.groups_owned)


def _network(of: Snapshot) -> Iterator[Family]:
    moved = {"up": of.bytes_up, "down": of.bytes_down}
    yield _by("spes_peers", "gauge", "Other peers heard of in the last two minutes.", "role", of.peers)
    yield _by("spes_links", "gauge", "Connected peers.", "path", of.links or {})
    yield _by(
        "spes_payload_bytes_total", "counter",
        "Bytes of requests and replies of this peer; what it relays for others is not in it.", "direction", moved,
    )  # fmt: skip
    yield _gauge("spes_dht_records", "Records of the DHT that this node keeps for others.", of.dht_records)
    yield Family(
        "spes_daemon_restarts_total", "counter", "Times that the network daemon was restarted.",
        (({}, of.daemon_restarts),),
    )  # fmt: skip
    yield _gauge(
        "spes_clock_offset_seconds",
        "Clocks of other peers minus this machine's, the median of those asked.",
        of.clock_offset_seconds,
    )
    checks = {name: int(is_well) for name, is_well in of.checks.items()}
    yield _by("spes_selfcheck_ok", "gauge", "1 when the last self-check found this in order.", "check", checks)
    yield _gauge("spes_selfcheck_timestamp_seconds", "When the last self-check ended.", of.checked)


def _machine(of: Snapshot) -> Iterator[Family]:
    yield _by("spes_disk_used_bytes", "gauge", "Disk that this peer's home takes.", "part", of.disk)
    yield _gauge("spes_disk_free_bytes", "Disk that is left beside this peer's home.", of.disk_free)
    yield _gauge("process_start_time_seconds", "When the process began.", of.started)
    yield _gauge("process_resident_memory_bytes", "Memory of the peer's own process.", of.resident_bytes)
    yield _gauge("process_open_fds", "Open file descriptors of the peer's own process.", of.open_files)


def _gauge(name: str, meaning: str, value: float | None, labels: Labels | None = None) -> Family:
    return Family(name, "gauge", meaning, () if value is None else ((labels or {}, value),))


def _by(name: str, kind: str, meaning: str, label: str, values: Mapping[str, float]) -> Family:
    return Family(name, kind, meaning, tuple(({label: key}, value) for key, value in sorted(values.items())))


def _text(family: Family) -> str:
    lines = [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
    for labels, value in family.samples:
        pairs = ",".join(f'{name}="{_escaped(text, quote=True)}"' for name, text in labels.items())
        lines.append(f"{family.name}{{{pairs}}} {_number(value)}" if pairs else f"{family.name} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str, *, quote: bool = False) -> str:
    """Text as the format wants it: help without line ends, label values without quotation marks too."""
    text = text.encode(errors="replace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # also of a bool
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
