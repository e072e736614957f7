"""What agreement costs: messages and bytes per peer and round, and seconds per round, from 4 to 200 peers.

python -m tests.sim.scale [--peers 4,8,16] [--rtt 0.05] [--rounds 2] [--json]

A quiet swarm in which everybody owns one group and trains equally long. Bytes are those of the real encoding, with tags
of a signature's length. Training, transfers and applying take fixed times and a line any number of bytes, and no time
passes in anybody's processor: the seconds are those that agreement adds by itself. Next to them stand what a line and a
processor would need on top: bytes, signatures to check, and the processor time of this machine without signatures.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from spes_protocols.codec import encode
from tests.sim.options import Options
from tests.sim.peers import SimPeer
from tests.sim.records import make_claim, peer_name
from tests.sim.world import World

PEERS = (4, 8, 16, 32, 64, 100, 200)
KINDS = ("header", "proposal", "prevote", "precommit")
TRAIN_SECONDS = 5.0
FETCH_SECONDS = 0.5
APPLY_SECONDS = 0.5
ROUND_SECONDS_MAX = 600.0


class SteadyPeer(SimPeer):
    """Needs the same time for the same work, always."""

    def pause(self, seconds_max: float) -> float:
        """All of it."""
        return seconds_max


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One size of swarm; what one peer sends and receives in one round, as means over peers and rounds."""

    peers: int
    messages: float
    bytes_headers: float
    bytes_proposals: float
    bytes_votes: float
    signatures: float
    commit_bytes: int
    added_seconds: float
    cpu_seconds: float

    @property
    def bytes_all(self) -> float:
        """Bytes that a peer sends in a round, without its blobs."""
        return self.bytes_headers + self.bytes_proposals + self.bytes_votes


def measure(peers: int, rtt_seconds: float, rounds: int) -> Cost:
    """Run some rounds after the first one, and count."""
    world = _swarm(peers, rtt_seconds)
    network = world.network
    _reach(world, 1)
    sent, size, began, cpu = network.sent.copy(), network.bytes.copy(), world.now, time.process_time()
    _reach(world, 1 + rounds)
    sent, size, cpu = network.sent - sent, network.bytes - size, time.process_time() - cpu
    scale = peers * rounds
    commit = next(iter(world.peers.values())).disk.chain[-1].commit
    assert commit is not None
    messages = sum(sent[kind] for kind in KINDS) / scale
    return Cost(
        peers=peers,
        messages=messages,
        bytes_headers=size["header"] / scale,
        bytes_proposals=size["proposal"] / scale,
        bytes_votes=(size["prevote"] + size["precommit"]) / scale,
        signatures=messages + peers,
        commit_bytes=len(encode(commit)),
        added_seconds=(world.now - began) / rounds - TRAIN_SECONDS - FETCH_SECONDS - APPLY_SECONDS,
        cpu_seconds=cpu / scale,
    )


def _swarm(peers: int, rtt_seconds: float) -> World:
    """Timeouts as the manifest has them by default."""
    options = Options(
        groups=peers,
        min_peers=peers,
        owners=peers,
        latency_seconds=rtt_seconds / 2,
        train_seconds_max=TRAIN_SECONDS,
        fetch_seconds_max=FETCH_SECONDS,
        apply_seconds_max=APPLY_SECONDS,
        grace_seconds=30.0,
        blob_seconds=300.0,
        propose_seconds=10.0,
        vote_seconds=10.0,
        stall_seconds=600.0,
        lease_seconds=3600.0,
    )
    world = World(options, 1, weighs=True)
    world.faults_on = False
    for number in range(peers):
        world.after(0.0, SteadyPeer(world, peer_name(number), f"p{number}").boot)
    world.organizer.start_run([make_claim(world.genesis, name) for name in world.peers])
    return world


def _reach(world: World, round_number: int) -> None:
    def is_there() -> bool:
        return all(peer.participant.head.round >= round_number for peer in world.peers.values())

    assert world.run(ROUND_SECONDS_MAX, is_there), f"round {round_number} was not reached"


COLUMNS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("peers", lambda cost: f"{cost.peers}"),
    ("messages", lambda cost: f"{cost.messages:.0f}"),
    ("kB sent", lambda cost: f"{cost.bytes_all / 1e3:.0f}"),
    ("headers", lambda cost: f"{cost.bytes_headers / 1e3:.0f}"),
    ("proposals", lambda cost: f"{cost.bytes_proposals / 1e3:.0f}"),
    ("votes", lambda cost: f"{cost.bytes_votes / 1e3:.0f}"),
    ("leader", lambda cost: f"{cost.bytes_proposals * cost.peers / 1e3:.0f}"),
    ("commit kB", lambda cost: f"{cost.commit_bytes / 1e3:.0f}"),
    ("signatures", lambda cost: f"{cost.signatures:.0f}"),
    ("CPU ms", lambda cost: f"{cost.cpu_seconds * 1e3:.1f}"),
    ("added s", lambda cost: f"{cost.added_seconds:.2f}"),
)
"""What one peer sends, checks and computes in one round; `headers` to `votes` are parts of `kB sent`, and `leader` is
what the leader sends of its proposal, whose headers everybody checks once more.
"""


def main(arguments: list[str] | None = None) -> int:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(map(str, PEERS)), help="sizes of swarms")
    parser.add_argument("--rtt", type=float, default=0.05, help="seconds there and back between any two peers")
    parser.add_argument("--rounds", type=int, default=2, help="how many are counted, after the first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    sizes = [int(text) for text in chosen.peers.split(",")]
    gc.disable()
    if chosen.json:
        costs = [asdict(measure(size, chosen.rtt, chosen.rounds)) for size in sizes]
        print(json.dumps({"rtt_seconds": chosen.rtt, "rounds": chosen.rounds, "costs": costs}, indent=2))
        return 0
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for size in sizes:
        cost = measure(size, chosen.rtt, chosen.rounds)
        print("| " + " | ".join(show(cost) for _, show in COLUMNS) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
