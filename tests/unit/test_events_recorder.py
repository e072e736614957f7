"""What a peer records: the first time, what changes, and how often the rest happened."""

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

from spes_p2p.core.head import Head
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.peer import events
from spes_p2p.peer.events import Event, parse
from spes_p2p.peer.outbox import QUEUE_MAX, Outbox
from spes_p2p.peer.recorder import REMEMBERED_MAX, STRANGE_LINES_MAX, Recorder
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Claim, Presence, Prevote, Signed
from spes_protocols.requests import PUSH
from tests.unit.hostile_support import MemoryTransport

ADA, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(2, 5))
RUN = bytes(range(32))
SET = bytes(reversed(range(32)))


class Notebook:
    """A recorder, and the events it wrote, each read back from its fields."""

    def __init__(self) -> None:
        self.written: list[Event] = []
        self.recorder = Recorder(self._write)

    def _write(self, name: str, fields: Any) -> None:
        event = parse(name, json.loads(json.dumps(fields)))
        assert event is not None, (name, fields)
        self.written.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.written if isinstance(event, kind)]


def head(number: int) -> Head:
    """A head before this round, unlike any other's."""
    return Head(run_id=RUN, epoch=RUN, round=number, id=number.to_bytes(32, "little"), state_root=SET, members=())


def prevote(identity: Identity, *, view: int = 0, round_number: int = 0, value: bytes = SET) -> Signed[Prevote]:
    return seal(Prevote(run_id=RUN, epoch=RUN, round=round_number, view=view, value=value), identity)


def outcomes(notebook: Notebook) -> list[tuple[str, int]]:
    return [(event.outcome, event.tries) for event in notebook.of(events.Sent)]


def test_tries_are_told_where_their_outcome_changes_and_ever_more_rarely() -> None:
    notebook, raw = Notebook(), prevote(ADA).raw
    refused = NetworkError("cannot reach it: connection refused")
    for _ in range(100):
        notebook.recorder.sent(BOB.peer_id, raw, time.monotonic(), refused)
    notebook.recorder.sent(BOB.peer_id, raw, time.monotonic())
    for _ in range(50):
        notebook.recorder.sent(BOB.peer_id, raw, time.monotonic())
    notebook.recorder.sent(BOB.peer_id, raw, time.monotonic(), RemoteError("busy", "not now"))
    failed = [("failed", 2**power) for power in range(7)]
    assert outcomes(notebook) == [*failed, ("delivered", 101), ("refused", 152)]
    sent = notebook.of(events.Sent)
    assert {event.kind for event in sent} == {"prevote"}
    assert sent[0].detail == "cannot reach it: connection refused"
    assert sent[-1].detail == "busy: not now"
    notebook.recorder.stopped(None)
    (repeats,) = notebook.of(events.Repeats)
    assert (repeats.sent, repeats.received) == (93 + 50, 0)


def test_a_record_that_comes_again_is_counted() -> None:
    notebook, vote = Notebook(), prevote(BOB)
    notebook.recorder.started("volunteer", head(0))
    for _ in range(5):
        notebook.recorder.received(BOB.peer_id, vote)
    notebook.recorder.received(EVE.peer_id, vote)
    notebook.recorder.received(BOB.peer_id, vote, RemoteError("epoch", "another"))
    heard = notebook.of(events.Received)
    assert [(event.sender, event.check) for event in heard] == [
        (BOB.peer_id, ""), (EVE.peer_id, ""), (BOB.peer_id, "epoch")
    ]  # fmt: skip
    assert (heard[0].signer, heard[0].kind, heard[0].round, heard[0].view) == (BOB.peer_id, "prevote", 0, 0)
    assert heard[0].value == SET.hex()[:16]
    notebook.recorder.head(head(1), None)
    notebook.recorder.received(BOB.peer_id, vote)  # in the new round it is news again, of an old one
    assert notebook.of(events.Repeats)[0].received == 4
    assert notebook.of(events.Received)[-1].here == 1


def test_a_flood_fills_neither_the_log_nor_the_memory() -> None:
    notebook = Notebook()
    notebook.recorder.started("volunteer", head(0))
    busy = RemoteError("busy", "this peer is still catching up")
    for number in range(REMEMBERED_MAX + 1000):
        notebook.recorder.turned_away(EVE.peer_id, number.to_bytes(8, "big"), busy)
    notebook.recorder.turned_away(BOB.peer_id, b"x", busy)
    heard = notebook.of(events.Received)
    assert len(heard) == STRANGE_LINES_MAX + 1
    assert heard[-1].sender == BOB.peer_id
    assert len(notebook.recorder._received) <= REMEMBERED_MAX
    notebook.recorder.head(head(1), None)
    notebook.recorder.turned_away(EVE.peer_id, b"y", busy)
    assert len(notebook.of(events.Received)) == STRANGE_LINES_MAX + 2


def test_a_view_says_what_the_one_before_lacked() -> None:
    notebook = Notebook()
    recorder = notebook.recorder
    recorder.started("volunteer", head(0))
    recorder.view(0, -1)
    recorder.view(0, 0)
    recorder.view(0, 0)
    recorder.said(prevote(ADA, value=b""))
    recorder.received(BOB.peer_id, prevote(BOB))
    recorder.view(0, 1)
    recorder.received(EVE.peer_id, prevote(EVE, view=3))
    recorder.view(0, 3)
    assert [(event.view, event.why) for event in notebook.of(events.ViewBegun)] == [
        (0, "the headers are in, or their time is over"),
        (1, f"no proposal in time (1 prevotes for nil, 1 prevotes for {SET.hex()[:6]})"),
        (3, "others are in it"),
    ]


def test_heads_say_how_they_came() -> None:
    notebook = Notebook()
    notebook.recorder.started("volunteer", head(0))
    for number in (0, 3, 2):
        notebook.recorder.head(head(number), None)
    assert [(event.round, event.how) for event in notebook.of(events.HeadMoved)] == [
        (0, "start"), (3, "catching up"), (2, "rollback")
    ]  # fmt: skip


def test_own_claims_that_repeat_are_told_once() -> None:
    notebook = Notebook()
    claim = seal(Claim(run_id=RUN, round=0, commit=RUN, state_root=RUN, wants=1), ADA)
    for _ in range(3):
        notebook.recorder.said(claim)
    (said,) = notebook.of(events.Said)
    assert (said.kind, said.id) == ("claim", claim.id.hex()[:16])


def test_connections_and_contacts_are_told_when_they_change() -> None:
    notebook = Notebook()
    recorder, bob = notebook.recorder, BOB.peer_id
    for links in ({}, {bob: "relayed"}, {bob: "relayed"}, {bob: "direct"}, {}):
        recorder.links(links)
    assert [event.path for event in notebook.of(events.Link)] == ["relayed", "direct", "down"]
    known = None
    for addresses in (("/a", "/b"), ("/b", "/a"), ("/c",)):
        now = Presence(run_id=RUN, addresses=addresses, role="volunteer", round=0, head=RUN, state_root=RUN, expires=1)
        recorder.presence(bob, known, now)
        known = now
    for error in (NetworkError("x"),) * 5 + (None,) + (NetworkError("x"),):
        recorder.hello(bob, error)
    told = [(event.what, event.tries) for event in notebook.of(events.Contact)]
    assert told == [("new", 1), ("moved", 1), ("silent", 1), ("silent", 2), ("silent", 4), ("silent", 1)]


def test_a_note_is_told_once_a_minute() -> None:
    notebook = Notebook()
    for line in ("disk full", "disk full", "other\x1b[2J", "disk full"):
        notebook.recorder.noted(line)
    assert [event.line for event in notebook.of(events.Noted)] == ["disk full", "other?[2J"]


def test_what_stands_in_the_way_of_a_commit_is_told_in_fields() -> None:
    notebook = Notebook()
    recorder = notebook.recorder
    recorder.relented(7, "majority", 12.3456)
    recorder.relented(7, "any", 40.0)
    recorder.said_twice(prevote(EVE, view=2, round_number=7), prevote(EVE, view=2, round_number=7, value=b""))
    recorder.halted(7, "no state root can reach a quorum\x1b[2J")
    first, second, twice, halted = notebook.written
    assert first == events.Relented(round=7, enough="majority", seconds=12.346)
    assert second == events.Relented(round=7, enough="any", seconds=40.0)
    assert twice == events.SaidTwice(
        signer=EVE.peer_id, kind="prevote", round=7, view=2, first=SET.hex()[:16], second=""
    )  # fmt: skip
    assert twice.peers == (EVE.peer_id,)
    assert halted == events.Halted(round=7, reason="no state root can reach a quorum?[2J")
    told = [event.told(lambda peer: peer[-6:]) for event in notebook.written]
    assert told == [
        "round 7: no commit for 12 s; owners of more than half of the groups may go on without the others",
        "round 7: no commit for 40 s; most owners are gone; whoever is here may go on, and goes back if the others "
        "went on too",
        f"heard {EVE.peer_id[-6:]} contradict itself in its prevote in view 2 of round 7: {SET.hex()[:16]}, nil",
        "halted in round 7: no state root can reach a quorum?[2J",
    ]


# ---- the outbox ------------------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


def test_the_outbox_tells_what_became_of_each_record() -> None:
    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        ada, bob = MemoryTransport(network, ADA), MemoryTransport(network, BOB)
        taken: list[bytes] = []

        async def take(sender: str, raw: bytes) -> bytes:
            taken.append(raw)
            if len(taken) > 1:
                raise RemoteError("claim", "not another one")
            return b""

        bob.handle(PUSH, take)
        notebook = Notebook()
        outbox = Outbox(ada, lambda peer, error: None, notebook.recorder)
        first, second, third = (prevote(ADA, view=view).raw for view in range(3))
        everybody = (ADA.peer_id, BOB.peer_id, EVE.peer_id)  # Eve is not there
        for raw in (first, second):
            outbox.send(everybody, raw)
        await outbox.flush(10)
        await outbox.close()
        told = {(event.to, event.outcome) for event in notebook.of(events.Sent)}
        assert told == {
            (BOB.peer_id, "delivered"), (BOB.peer_id, "refused"), (EVE.peer_id, "failed"), (EVE.peer_id, "dropped")
        }  # fmt: skip
        assert taken == [first, second]

        notebook.written.clear()
        for _ in range(QUEUE_MAX + 1):
            outbox.send((BOB.peer_id,), third)
        assert [(event.outcome, event.detail) for event in notebook.of(events.Sent)] == [
            ("dropped", "too many records wait for this peer")
        ]
        await outbox.close()

    run(whole())
