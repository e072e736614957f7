"""What one slow member's contribution costs: how often its line carries it, and how long until everybody has it.

    python benchmarks/passing_on.py                four members, one at a tenth of the others' rate (three minutes)
    python benchmarks/passing_on.py --members 8

Real transports on one machine, each with the limit of a line (`--max-up`); nothing trains. In every round each member
makes a contribution of a shared part and an expert group, and fetches all others'. The first round is the one in which
nobody knows yet who is slow. Done twice, side by side: with peers that ask one another what they hold (SPEC 10.6), and
with peers that do not answer that.

The bound is 1 for both figures: the line of the slow one carries its contribution once, and it takes that long.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from common import machine, new_parser, new_table, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spes_client.ui import run_program
from spes_p2p.net.blobs import serve_blobs
from spes_p2p.net.limits import Limits, Schedule
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.sync import Syncer
from spes_p2p.store.blobs import BlobStore
from spes_protocols.errors import NetworkError, UserError
from spes_protocols.messages import Section
from tests.net.helpers import Everybody, Net, Node

SHARED_SHARE = 0.354
"""Of the contribution of a `1b` peer that owns one of four groups."""

DEADLINE_SECONDS = 300.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """What the slow member's line sent, over its contribution; when all had it, over that line's time for it once."""

    sent: float
    took: float
    others_took: float
    """The same of all contributions but the slow one's."""


class Member:
    """The part of a peer that has to do with blobs."""

    def __init__(self, net: Net, node: Node, *, asks: bool) -> None:
        self.node = node
        self.store = BlobStore(net.folder / f"blobs-{node.peer_id}")
        serve_blobs(node.transport, self.store.read_range)
        nothing = cast(Any, None)
        self.syncer = Syncer(
            nothing, node.transport, cast(Contacts, Everybody(net, node)), nothing, nothing, self.store, nothing,
            report=lambda text, share: None, log=lambda line: None,
        )  # fmt: skip
        if asks:
            self.syncer.exchange.serve()

    def contribution(self, size: int, blobs: int) -> list[Section]:
        """New blobs: of two the shares of a shared part and a group, else of the same size."""
        first = int(size * SHARED_SHARE) if blobs == 2 else size // blobs
        sizes = [first, *[(size - first) // (blobs - 1)] * (blobs - 1)]
        return [
            Section(name=f"expert/{number}", codec="f32", blob=self.store.put(os.urandom(each)), size=each)
            for number, each in enumerate(sizes)
        ]


async def one_round(members: Sequence[Member], size: int, blobs: int, own_part: float) -> Round:
    """Everybody fetches everybody's; the last member is the slow one."""
    made = {member.node.peer_id: member.contribution(size, blobs) for member in members}
    slow = members[-1].node
    before, begun = slow.transport.bytes_up, time.monotonic()

    async def fetch(member: Member, author: str) -> tuple[bool, float]:
        wanted = [(author, section) for section in made[author]]
        while True:
            try:
                await member.syncer.blobs(wanted, begun + DEADLINE_SECONDS)
                break
            except NetworkError:  # busy within its limit, say: a peer tries again too
                if time.monotonic() > begun + DEADLINE_SECONDS:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        return author == slow.peer_id, time.monotonic() - begun

    done = await asyncio.gather(
        *(fetch(member, author) for member in members for author in made if author != member.node.peer_id)
    )
    whole = sum(section.size for section in made[slow.peer_id])
    took, others = (max(at for is_slow, at in done if is_slow is of_slow) for of_slow in (True, False))
    return Round(
        sent=(slow.transport.bytes_up - before) / whole, took=took / own_part, others_took=others / own_part
    )  # fmt: skip


async def measure(
    folder: Path, *, asks: bool, members: int, blobs: int, size: int, rate: float, slow: float, rounds: int
) -> list[Round]:
    """So many rounds of so many members."""
    net = Net(folder)
    try:
        for number in range(members):
            rate_up = rate * (slow if number == members - 1 else 1.0)
            limits = Limits.of(Schedule(rate=rate_up), Schedule())
            await net.node(limits=Limits(up=limits.up, counts_local=True))
        addresses = {node.peer_id: await node.address() for node in net.nodes}
        for node in net.nodes:
            for peer, address in addresses.items():
                if peer != node.peer_id:
                    node.transport.add_address(peer, [address])
        everybody = [Member(net, node, asks=asks) for node in net.nodes]
        return [await one_round(everybody, size, blobs, size / (rate * slow)) for _ in range(rounds)]
    finally:
        await net.close()


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--members", type=int, default=4, metavar="N", help="how many, the slow one with them (4)")
    parser.add_argument("--blobs", type=int, default=2, metavar="N", help="of a contribution (default 2)")
    parser.add_argument("--mb", type=float, default=4.5, metavar="MB", help="of a contribution (default 4.5)")
    parser.add_argument("--rate", type=float, default=3.0, metavar="MB", help="MB/s of the fast (default 3)")
    parser.add_argument("--slow", type=float, default=0.1, metavar="X", help="the slow one's share of it (default 0.1)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how many (default 3)")
    arguments = parser.parse_args()
    if not 3 <= arguments.members <= 32 or not 2 <= arguments.blobs <= 32 or not 1 <= arguments.rounds <= 100:
        raise UserError("--members is 3 to 32, --blobs 2 to 32, --rounds 1 to 100")
    asked = {
        "members": arguments.members, "blobs": arguments.blobs, "size": int(arguments.mb * 1e6),
        "rate": arguments.rate * 1e6, "slow": arguments.slow, "rounds": arguments.rounds,
    }  # fmt: skip
    found: dict[bool, list[Round]] = {}
    for asks in (False, True):
        with tempfile.TemporaryDirectory(prefix="spes-benchmark-") as folder:
            found[asks] = asyncio.run(measure(Path(folder), asks=asks, **asked))
    table = new_table(
        f"{asked['members']} members, one at {asked['slow']:g} of the rate; over its contribution, sent once",
        "round", "sent", "sent, asking", "until all had it", "asking", "all others'", "asking",
    )  # fmt: skip
    for number, (without, having) in enumerate(zip(found[False], found[True], strict=True)):
        pairs = zip(asdict(without).values(), asdict(having).values(), strict=True)
        table.add_row(str(number), *(f"{value:.2f}" for pair in pairs for value in pair))
    means = {
        name: {
            key: fmean(getattr(each, key) for each in found[asks][1:] or found[asks]) for key in asdict(found[asks][0])
        }
        for name, asks in (("without", False), ("asking", True))
    }
    figures = {"machine": machine(), **asked, "mean_but_the_first": means} | {
        name: [asdict(each) for each in found[asks]] for name, asks in (("without", False), ("asking", True))
    }
    show([table], figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
