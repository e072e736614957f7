"""Commits of a few, as others' ledgers offer them: who follows them, and who asks around first (SPEC 5.12, 5.13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from spes_p2p.core.forks import Few, Rank, judge_few
from spes_p2p.core.patience import HEARD_REPEATS
from spes_p2p.crypto.keys import Identity
from spes_p2p.peer.inquiry import ASKED_MAX, KEPT_SECONDS
from spes_p2p.peer.peer import Peer
from spes_protocols.codec import decode
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Ownership
from spes_protocols.requests import CHAIN, HELLO, ChainRequest
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, RunLog
from tests.unit.test_hostile_peer import CARL, make_peer, presence, serve

OFFERED = Rank(1, 0, 1, 1, bytes(32))
BETTER, WORSE = Rank(1, 0, 1, 2, bytes(32)), Rank(1, 0, 1, 0, bytes(32))


@pytest.mark.parametrize(
    ("answers", "waited", "few"),
    [
        ({}, False, Few.TAKE),
        ({"gone": OFFERED, "other": OFFERED}, False, Few.TAKE),
        ({"gone": WORSE}, False, Few.TAKE),
        ({"kept": None, "stranger": None}, False, Few.TAKE),
        ({"gone": None}, False, Few.WAIT),
        ({"gone": None, "other": OFFERED}, False, Few.WAIT),
        ({"gone": None}, True, Few.TAKE),
        ({"gone": None, "stranger": BETTER}, False, Few.BETTER),
        ({"stranger": BETTER}, False, Few.BETTER),
        ({"stranger": BETTER}, True, Few.TAKE),
    ],
)
def test_the_decision(answers: dict[str, Rank | None], waited: bool, few: Few) -> None:
    assert judge_few(OFFERED, frozenset({"gone"}), answers, has_waited=waited) == few


# ---- a whole peer --------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    """Three owners of a group each, one round old."""
    made = RunLog(tmp_path / "log", ownership=Ownership(groups=4, min_peers=3))
    made.start([made.claim(ADA), made.claim(BOB), made.claim(EVE)])
    made.close_round([made.header(ADA), made.header(BOB), made.header(EVE)], voters=[ADA, BOB, EVE])
    yield made
    made.close()


class Scene:
    """A peer that has the log so far and begins to catch up, among others who say that they are ahead of it."""

    def __init__(self, peer: Peer, network: dict[str, MemoryTransport]) -> None:
        self.peer = peer
        self.network = network
        self.mine = network[peer.identity.peer_id]

    async def meet(self, who: Identity, log: RunLog) -> MemoryTransport:
        """Somebody with this ledger can be reached."""
        transport = MemoryTransport(self.network, who)
        serve(transport, log)
        await self.mine.receive(who.peer_id, HELLO, presence(who, log, 1).raw)
        return transport

    async def join(self) -> bytes:
        """Come up to date as at the start; the id of the head it comes to."""
        await self.peer.catching_up.join()
        return self.peer.chain.head.id

    def wait(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        """Let time pass in which nothing happens."""
        now = time.monotonic() + seconds
        monkeypatch.setattr(time, "monotonic", lambda: now)

    async def meet_again(self, *others: tuple[Identity, RunLog]) -> None:
        for who, log in others:
            await self.mine.receive(who.peer_id, HELLO, presence(who, log, 1).raw)


def play(folder: Path, log: RunLog, test: Callable[[Scene], Awaitable[None]], identity: Identity = CARL) -> None:
    """Run a test with a peer that follows the ledger alone."""

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        peer = make_peer(folder / "peer", log, MemoryTransport(network, identity), identity, [])
        try:
            await test(Scene(peer, network))
        finally:
            await peer.close()

    asyncio.run(whole())


def alone(log: RunLog, folder: Path, who: Identity, rounds: int = 1) -> RunLog:
    """What one owner makes of the log when it says that the others are gone."""
    other = log.fork(folder)
    other.close_with(who)
    for _ in range(rounds - 1):
        other.close_round([other.header(who)], voters=[who])
    return other


@pytest.mark.parametrize("who", [CARL, BOB], ids=["a newcomer", "an owner that restarts"])
def test_a_liar_that_is_met_first_leads_nobody_away_while_the_round_is_open(
    tmp_path: Path, log: RunLog, who: Identity
) -> None:
    lie = alone(log, tmp_path / "lie", ADA, rounds=3)

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, lie)
        await scene.meet(EVE, log)
        assert await scene.join() == log.chain.head.id

    play(tmp_path, log, test, who)
    lie.close()


def test_nor_one_that_has_good_records_before_it(tmp_path: Path, log: RunLog) -> None:
    true = log.fork(tmp_path / "true")
    good = true.close_round([true.header(ADA), true.header(BOB), true.header(EVE)], voters=[ADA, BOB, EVE])
    lie = alone(true, tmp_path / "lie", ADA, rounds=3)

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, lie)
        await scene.meet(BOB, true)
        assert await scene.join() == good.after.id

    play(tmp_path, log, test)
    true.close()
    lie.close()


def test_who_has_a_better_commit_is_read_instead(tmp_path: Path, log: RunLog) -> None:
    lie = alone(log, tmp_path / "lie", ADA)
    true = log.fork(tmp_path / "true")
    true.close_with(BOB, EVE)
    true.close_round([true.header(BOB), true.header(EVE)], voters=[BOB, EVE])

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, lie)
        stranger = await scene.meet(CARL, true)
        assert await scene.join() == true.chain.head.id
        assert scene.peer.chain.length == 4
        assert stranger.peer_id in {peer for peer, _ in scene.mine.calls}

    play(tmp_path, log, test, Identity.generate())
    lie.close()
    true.close()


@pytest.mark.parametrize("others", ["nobody", "strangers", "followers"])
def test_a_commit_of_a_few_is_followed_when_those_it_drops_are_gone(tmp_path: Path, log: RunLog, others: str) -> None:
    real = alone(log, tmp_path / "real", ADA, rounds=3)

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, real)
        if others == "strangers":
            await scene.meet(Identity.generate(), log)
        if others == "followers":
            await scene.meet(BOB, real)
        assert await scene.join() == real.chain.head.id
        assert scene.peer.chain.length == 5

    play(tmp_path, log, test)
    real.close()


def test_each_commit_of_a_few_is_asked_about(tmp_path: Path, log: RunLog) -> None:
    real = alone(log, tmp_path / "real", ADA)
    real.close_round([real.header(ADA), real.header(BOB)], voters=[ADA])  # BOB is back
    assert len(real.chain.head.electorate.owners) == 2
    lie = alone(real, tmp_path / "lie", ADA)

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, lie)
        await scene.meet(BOB, real)
        assert await scene.join() == real.chain.head.id

    play(tmp_path, log, test)
    real.close()
    lie.close()


def test_asking_about_one_ledger_ends_and_goes_on_later(
    tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = log.fork(tmp_path / "real")
    for _ in range(5):  # a few, then BOB is back
        real._seed %= 8  # the tokens of a round are limited
        real.close_with(ADA)
        real.close_round([real.header(ADA), real.header(BOB)], voters=[ADA])

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, real)
        asked = 0

        async def slow(*_: object, **__: object) -> Few:
            nonlocal asked
            asked += 1
            scene.wait(monkeypatch, 25.0)  # nobody answers
            return Few.TAKE

        catching_up = scene.peer.catching_up
        monkeypatch.setattr(catching_up._inquiry, "judge", slow)
        came = [await catching_up._ledger_from(ADA.peer_id) for _ in range(2)]
        assert (came, asked) == ([6, 4], 5)
        assert scene.peer.chain.head.id == real.chain.head.id
        monkeypatch.undo()

    play(tmp_path, log, test)
    real.close()


def test_who_says_for_ever_that_the_round_is_open_is_outlasted(
    tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = alone(log, tmp_path / "real", ADA, rounds=3)

    async def test(scene: Scene) -> None:
        await scene.meet(ADA, real)
        await scene.meet(EVE, log)
        catching_up = scene.peer.catching_up
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == log.chain.head.id
        times = scene.mine.calls.count((EVE.peer_id, CHAIN))
        scene.wait(monkeypatch, KEPT_SECONDS + 1)
        await scene.meet_again((ADA, real), (EVE, log))
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == log.chain.head.id
        assert scene.mine.calls.count((EVE.peer_id, CHAIN)) <= times + 3
        scene.wait(monkeypatch, log.manifest.rounds.lease_seconds)
        await scene.meet_again((ADA, real), (EVE, log))
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == real.chain.head.id

    play(tmp_path, log, test)
    real.close()


def test_who_shows_a_better_commit_and_lets_nobody_read_it_is_outlasted(
    tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [(alone(log, tmp_path / "ada", ADA), ADA), (alone(log, tmp_path / "eve", EVE), EVE)]
    (lie, liar), (real, true) = sorted(both, key=lambda pair: pair[0].chain.head.id)

    async def test(scene: Scene) -> None:
        transport = await scene.meet(liar, lie)
        answer = transport._handlers[CHAIN]

        async def shown_only(sender: str, request: bytes) -> bytes:
            if len(decode(ChainRequest, request).known) > 1:
                raise RemoteError("busy", "")
            return await answer(sender, request)

        transport.handle(CHAIN, shown_only)
        await scene.meet(true, real)
        catching_up = scene.peer.catching_up
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == log.chain.head.id
        scene.wait(monkeypatch, log.manifest.rounds.lease_seconds)
        await scene.meet_again((true, real), (liar, lie))
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == real.chain.head.id
        transport.handle(CHAIN, answer)
        scene.wait(monkeypatch, log.manifest.rounds.lease_seconds)
        await scene.meet_again((true, real), (liar, lie))
        await catching_up.run(first=True)
        assert scene.peer.chain.head.id == lie.chain.head.id, "it can be read now, and goes before the other"

    play(tmp_path, log, test)
    lie.close()
    real.close()


def test_one_owner_alone_drops_nobody_who_hears_the_others(
    tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie, heard = alone(log, tmp_path / "lie", ADA), log.header(EVE)
    rules = log.manifest.rounds

    async def offered(scene: Scene) -> bytes:
        scene.peer.catching_up._ahead._unhelpful.clear()
        await scene.meet_again((ADA, lie))
        scene.peer.shell.participant.on_tick(time.monotonic())
        await scene.peer.catching_up.run()
        return scene.peer.chain.head.id

    async def test(scene: Scene) -> None:
        await scene.join()
        await scene.meet(ADA, lie)
        participant = scene.peer.shell.participant
        participant.patience.waited_seconds = rules.lease_seconds
        participant.on_message(heard, time.monotonic(), sender=EVE.peer_id)
        assert await offered(scene) == log.chain.head.id
        if is_silent:
            scene.wait(monkeypatch, HEARD_REPEATS * rules.vote_seconds + 1)
        else:
            participant.patience.waited_seconds = 2 * rules.lease_seconds
            participant.on_message(heard, time.monotonic(), sender=EVE.peer_id)
        assert await offered(scene) == lie.chain.head.id

    for is_silent in (True, False):
        play(tmp_path / str(is_silent), log, test, BOB)
    lie.close()


def test_who_takes_part_in_the_round_waits_itself(tmp_path: Path, log: RunLog) -> None:
    real = alone(log, tmp_path / "real", ADA)

    async def test(scene: Scene) -> None:
        assert await scene.join() == log.chain.head.id
        await scene.meet(ADA, real)
        await scene.peer.catching_up.run()
        assert scene.peer.chain.head.id == log.chain.head.id
        scene.peer.shell.participant.patience.waited_seconds = log.manifest.rounds.lease_seconds
        scene.peer.shell.participant.on_tick(time.monotonic())
        await scene.meet_again((ADA, real))
        scene.peer.catching_up._ahead._unhelpful.clear()
        await scene.peer.catching_up.run()
        assert scene.peer.chain.head.id == real.chain.head.id

    play(tmp_path, log, test)
    real.close()


def test_a_crowd_is_not_asked_by_one(tmp_path: Path, log: RunLog) -> None:
    lie = alone(log, tmp_path / "lie", ADA)

    async def test(scene: Scene) -> None:
        liars = [Identity.generate() for _ in range(40)]
        for liar in (ADA, *liars):
            await scene.meet(liar, lie)
        await scene.meet(EVE, log)
        assert await scene.join() == log.chain.head.id
        asked = [peer for peer, method in scene.mine.calls if method == CHAIN]
        assert len(asked) <= 42 + ASKED_MAX

    play(tmp_path, log, test)
    lie.close()
