"""`spes events`: one timeline from peers whose clocks differ, and why something did not arrive."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_client.timeline import Timeline, read_round
from spes_client.ui import short_peer
from spes_client.why import why
from spes_p2p.peer.events import (
    BlobAsked,
    BlobCame,
    BlobFailed,
    BlobRefused,
    Contact,
    Event,
    HeaderMade,
    HeadMoved,
    Link,
    Noted,
    Received,
    Said,
    Sent,
    TrainerEnded,
    Training,
    plain,
)
from spes_protocols.errors import UserError
from tests.unit.cli_support import Spes

ANNA, BORIS, CLARA = PEERS = tuple("12D3KooW" + letter * 44 for letter in "ABC")
RUN = "ab" * 32
BEGINNING = 1_700_000_000
HEADER = "0123456789abcdef"


class Diary:
    """A peer's event log, written at times of a clock that all share and that this peer shows wrongly."""

    def __init__(self, folder: Path, peer: str, *, skew: float = 0.0, run: str = RUN) -> None:
        self.path = folder / peer[-1] / "events.jsonl"
        self.path.parent.mkdir()
        self.peer = peer
        self._skew = skew
        self._steady = 1000.0 + abs(skew)
        self._fields = {"format": 1, "peer": peer, "run": run, "version": "1"}
        self.start(-10.0)

    def start(self, at: float, *, late: float = 0.0) -> None:
        """Another start, which reads both clocks `late` seconds apart."""
        start = {"started_at": self._unix_ms(at), "started": self._steady + at + late}
        self._put(at, "log", self._fields | start)

    def tell(self, at: float, *events: Event) -> None:
        for event in events:
            self._put(at, event.NAME, plain(event))

    def _unix_ms(self, at: float) -> int:
        return round((BEGINNING + at + self._skew) * 1000)

    def _put(self, at: float, name: str, fields: dict[str, Any]) -> None:
        line = {"at": self._unix_ms(at), "mono": round(self._steady + at, 6), "event": name, **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def head(number: int, epoch: str = "e") -> HeadMoved:
    return HeadMoved(round=number, id=f"h{number}", epoch=epoch, root="r", how="agreement")


def made(name: str = HEADER, number: int = 12) -> HeaderMade:
    return HeaderMade(round=number, id=name, tokens=8, steps=2, bytes=100)


def passes(at: float, name: str, sender: Diary, receiver: Diary, *, took: float = 0.02, kind: str = "header") -> None:
    """A record goes over: half of `took` there, half back."""
    receiver.tell(
        at + took / 2, Received(sender=sender.peer, id=name, kind=kind, signer=sender.peer, round=12)
    )  # fmt: skip
    sender.tell(at + took, Sent(to=receiver.peer, id=name, kind=kind, outcome="delivered", seconds=took))


def swarm(folder: Path, *skews: float) -> list[Diary]:
    """Peers that stand before round 12 from time 0 on, and tell of records that went between all of them."""
    diaries = [Diary(folder, peer, skew=skew) for peer, skew in zip(PEERS, skews, strict=False)]
    for number, diary in enumerate(diaries):
        diary.tell(-5.0, head(11))
        diary.tell(0.001 * number, head(12))
    return diaries


def exchange(diaries: Sequence[Diary]) -> None:
    for number, sender in enumerate(diaries):
        name = f"{number:016x}"
        sender.tell(1.0 + number, made(name))
        for receiver in diaries:
            if receiver is not sender:
                passes(1.0 + number + 0.001, name, sender, receiver)


def close(diaries: Sequence[Diary], at: float = 20.0) -> None:
    for diary in diaries:
        diary.tell(at, head(13))


def order(timeline: Timeline) -> list[tuple[str, str]]:
    return [(m.peer[-1], m.event.NAME) for m in timeline.moments]


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str]) -> Spes:
    return Spes(capsys)


def test_clocks_that_differ_are_compared_by_what_went_between(tmp_path: Path) -> None:
    diaries = swarm(tmp_path, 0.0, 3600.0, -7.25)
    exchange(diaries)
    close(diaries)
    timeline = read_round([diary.path for diary in diaries])
    assert (timeline.round, timeline.run, timeline.agree) == (12, RUN, False)
    offsets = {clock.peer: clock.offset for clock in timeline.clocks}
    assert offsets[BORIS] - offsets[ANNA] == pytest.approx(-3600.0, abs=0.02)
    assert offsets[CLARA] - offsets[ANNA] == pytest.approx(7.25, abs=0.02)
    assert all(clock.uncertain <= 0.02 for clock in timeline.clocks)
    assert timeline.end - timeline.zero == pytest.approx(20.0, abs=0.02)
    assert [timeline.seconds(m) for m in timeline.moments if m.event.NAME == "header"] == pytest.approx(
        [1.0, 2.0, 3.0], abs=0.02
    )


def test_clocks_that_agree_are_left_alone(tmp_path: Path) -> None:
    diaries = swarm(tmp_path, 0.0, 0.0004, 0.0)
    exchange(diaries)
    close(diaries)
    timeline = read_round([diary.path for diary in diaries])
    assert timeline.agree
    assert {clock.offset for clock in timeline.clocks} == {0.0}
    assert order(timeline)[:8] == [
        ("A", "head"), ("B", "head"), ("C", "head"),
        ("A", "header"), ("A", "sent"), ("A", "sent"), ("B", "received"), ("C", "received"),
    ]  # fmt: skip


def test_a_peer_that_nothing_went_to_keeps_its_clock(tmp_path: Path) -> None:
    diaries = swarm(tmp_path, 0.0, 50.0, 0.0)
    exchange(diaries[:2])
    close(diaries)
    clocks = {clock.peer: clock for clock in read_round([diary.path for diary in diaries]).clocks}
    assert math.isinf(clocks[CLARA].uncertain)
    assert clocks[CLARA].offset == 0.0
    assert clocks[BORIS].offset - clocks[ANNA].offset == pytest.approx(-50.0, abs=0.02)


def kill_and_restart(folder: Path) -> tuple[list[Diary], dict[str, float]]:
    """Three peers of which one is killed and begins anew, and when what they note happened.

    It is killed before it can write that it pushed its header, and pushes it again when it is back: what the others
    heard at 3 s seems to have been pushed at 15 s. Both its starts read the clocks some milliseconds apart.
    """
    diaries = anna, boris, clara = swarm(folder, 0.0, 0.0, 0.0)
    lines: list[tuple[float, Diary, Event]] = []
    truth = {}
    for step in range(1, 190):
        if not 35 <= step < 120:
            lines.append((step / 10, boris, Noted(line=f"boris {step}")))
        lines += [(step / 10, diary, Noted(line=f"{diary.peer[-1]} {step}")) for diary in (anna, clara)]
    truth = {event.line: at for at, _, event in lines if isinstance(event, Noted)}

    def goes(at: float, name: str, sender: Diary, receiver: Diary, took: float, *, again: float | None = None) -> None:
        came = Received(sender=sender.peer, id=name, kind="header", signer=sender.peer, round=12)
        sent = Sent(to=receiver.peer, id=name, kind="header", outcome="delivered", seconds=took)
        lines.append((at + took / 2, receiver, came))
        lines.append(((at if again is None else again) + took, sender, sent))

    for number, sender in enumerate(diaries):
        for receiver in diaries:
            if receiver is sender:
                continue
            for part, at in enumerate((0.5, 1.5, 13.5, 16.5)):
                name = f"{part}{number:015x}"
                goes(at + number / 7, name, sender, receiver, 0.004)
            if sender is boris:
                goes(3.0, HEADER, sender, receiver, 0.03, again=15.0)
    lines += [(2.9, boris, made())]
    lines += [(at + 1 / 7 - 0.01, boris, made(f"{part}{1:015x}")) for part, at in enumerate((0.5, 1.5, 13.5, 16.5))]
    back = False
    for at, diary, event in sorted(lines, key=lambda line: line[0]):
        if diary is boris and at >= 12 and not back:
            boris.start(11.5, late=0.008)
            boris.tell(11.6, head(12))
            back = True
        diary.tell(at, event)
    return diaries, truth


def noted(timeline: Timeline) -> dict[str, float]:
    return {m.event.line: timeline.seconds(m) for m in timeline.moments if isinstance(m.event, Noted)}


def test_what_a_killed_peer_pushes_anew_does_not_draw_others_after_it(tmp_path: Path) -> None:
    diaries, truth = kill_and_restart(tmp_path)
    close(diaries)
    timeline = read_round([diary.path for diary in diaries])
    shown = noted(timeline)
    assert shown.keys() == truth.keys()
    assert {line: at for line, at in shown.items() if abs(at - truth[line]) > 0.02} == {}
    heard = [timeline.seconds(m) for m in timeline.moments if getattr(m.event, "sender", "") == BORIS]
    pushed = [3.0, *(at + 1 / 7 for at in (0.5, 1.5, 13.5, 16.5))]
    assert heard == pytest.approx(sorted([*pushed, *pushed]), abs=0.03)


def test_a_killed_peer_that_is_known_by_one_line_of_its_second_start_keeps_its_clock(tmp_path: Path) -> None:
    diaries = anna, boris = swarm(tmp_path, 0.0, 100.0)
    for number, at in enumerate((1.0, 2.0, 3.0)):
        passes(at, f"{number:016x}", anna, boris)
    boris.start(10.0)
    boris.tell(11.0, head(12), Noted(line="back"))
    close(diaries)
    assert noted(read_round([diary.path for diary in diaries]))["back"] == pytest.approx(11.0, abs=0.03)


def test_a_record_whose_first_receipt_was_lost_is_outvoted(tmp_path: Path) -> None:
    diaries = anna, boris = swarm(tmp_path, 0.0, 100.0)
    for number, at in enumerate((1.0, 2.0)):
        passes(at, f"{number:016x}", anna, boris)
    anna.tell(3.02, Sent(to=BORIS, id="9" * 16, kind="header", outcome="delivered", seconds=0.02))
    boris.tell(9.0, Received(sender=ANNA, id="9" * 16, kind="header", signer=ANNA, round=12), Noted(line="late"))
    close(diaries)
    timeline = read_round([diary.path for diary in diaries])
    assert noted(timeline)["late"] == pytest.approx(9.0, abs=0.03)
    offsets = {clock.peer: clock.offset for clock in timeline.clocks}
    assert offsets[BORIS] - offsets[ANNA] == pytest.approx(-100.0, abs=0.03)


def test_only_the_receipt_is_moved_and_it_says_so(tmp_path: Path, spes: Spes) -> None:
    diaries = anna, boris = swarm(tmp_path, 0.0, -0.002)  # a difference that is too small to be corrected
    passes(1.0, HEADER, anna, boris, took=0.002)
    boris.tell(1.001, Noted(line="after it"))
    close(diaries)
    timeline = read_round([diary.path for diary in diaries])
    assert timeline.agree
    (got,) = (m for m in timeline.moments if isinstance(m.event, Received))
    (push,) = (m for m in timeline.moments if isinstance(m.event, Sent))
    assert push.at < got.at < push.at + 0.0001
    assert got.moved == pytest.approx(0.001, abs=0.0001)
    assert [m.event.NAME for m in timeline.moments if m.moved] == ["received"]
    shown = spes("events", *(diary.path for diary in diaries))
    assert "~+1.001  …BBBBBB  heard from …AAAAAA" in shown.out
    (event,) = (
        event
        for event in spes("events", *(diary.path for diary in diaries), "--json").json["events"]
        if "moved" in event
    )
    assert (event["event"], event["moved"]) == ("received", pytest.approx(got.moved, abs=1e-6))
    assert noted(timeline)["after it"] - timeline.seconds(got) == pytest.approx(-0.001, abs=0.0001)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-7200, 7200), min_size=3, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0.1, 15), st.floats(0.001, 3), st.booleans()),
        max_size=20,
    ),
)
def test_no_receipt_stands_before_its_push(
    tmp_path_factory: pytest.TempPathFactory,
    skews: list[float],
    records: list[tuple[int, int, float, float, bool]],
) -> None:
    diaries = swarm(tmp_path_factory.mktemp("swarm"), *skews)
    lines: list[tuple[float, Diary, Event]] = []
    for number, (a, b, at, took, answered) in enumerate(records):
        if a == b:
            continue
        sender, receiver, name = diaries[a], diaries[b], f"{number:016x}"
        came = Received(sender=sender.peer, id=name, kind="header", signer=sender.peer, round=12)
        outcome = "delivered" if answered else "failed"
        sent = Sent(to=receiver.peer, id=name, kind="header", outcome=outcome, seconds=took)
        lines += [(at + took / 3, receiver, came), (at + took, sender, sent)]
    for at, diary, event in sorted(lines, key=lambda line: line[0]):
        diary.tell(at, event)
    close(diaries)
    moments = read_round([diary.path for diary in diaries], 12).moments
    times = [moment.at for moment in moments]
    assert times == sorted(times)
    begun = {(m.peer, m.event.to, m.event.id): m.at for m in moments if isinstance(m.event, Sent)}
    got = {(m.event.sender, m.peer, m.event.id): m.at for m in moments if isinstance(m.event, Received)}
    assert len(got) == len(lines) // 2
    assert all(begun[key] < at for key, at in got.items())


def test_a_round_that_a_reset_began_again_is_shown_as_it_was_the_last_time(tmp_path: Path) -> None:
    (diary,) = swarm(tmp_path, 0.0)
    diary.tell(1.0, made("1" * 16))
    diary.tell(2.0, head(13))
    diary.tell(50.0, head(12, epoch="reset"))
    diary.tell(51.0, made("2" * 16))
    diary.tell(52.0, head(13, epoch="reset"))
    timeline = read_round([diary.path], 12)
    assert [m.event.id for m in timeline.moments if isinstance(m.event, HeaderMade)] == ["2" * 16]
    assert timeline.end - timeline.zero == pytest.approx(2.0)


def test_what_belongs_to_other_rounds_is_left_out(tmp_path: Path) -> None:
    diaries = swarm(tmp_path, 0.0, 0.0)
    exchange(diaries)
    late = Received(sender=ANNA, id="9" * 16, kind="precommit", signer=ANNA, round=11, view=0, here=12)
    diaries[1].tell(5.0, late)
    close(diaries)
    diaries[0].tell(21.0, Sent(to=BORIS, id="0" * 16, kind="header", outcome="failed", tries=2, detail="gone"))
    moments = read_round([diary.path for diary in diaries], 12).moments
    assert late not in [m.event for m in moments]
    assert "gone" in [m.event.detail for m in moments if isinstance(m.event, Sent)]  # after the round, but of it


# ---- why -------------------------------------------------------------------------------------------------------------


def told(diaries: Sequence[Diary], what: str, maker: str, to: str | None = None) -> list[str]:
    timeline = read_round([diary.path for diary in diaries], 12)
    return [" ".join(answer.sentences()) for answer in why(timeline, what, maker, short_peer, to)]


def test_why_a_header_did_not_arrive(tmp_path: Path) -> None:
    diaries = anna, boris, _ = swarm(tmp_path, 0.0, 0.0, 0.0)
    anna.tell(1.0, made())
    passes(1.1, HEADER, anna, boris)
    detail = f"cannot reach {CLARA}: connection refused"
    anna.tell(1.2, Sent(to=CLARA, id=HEADER, kind="header", outcome="failed", detail=detail))
    anna.tell(9.2, Sent(to=CLARA, id=HEADER, kind="header", outcome="failed", tries=4, detail=detail))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA)
    assert answer.startswith("…AAAAAA made its header of round 12 (01234567) 1.000 s after the head.")
    assert "It reached …BBBBBB after 0.110 s." in answer
    assert "…CCCCCC never received it: 4 pushes failed, the last one told of 9.200 s after the head" in answer
    assert "(cannot reach …CCCCCC: connection refused)" in answer
    assert told(diaries, "header", ANNA, BORIS) == [answer.partition(" …CCCCCC never")[0]]


def test_why_a_header_was_refused_dropped_or_lost(tmp_path: Path) -> None:
    diaries = anna, boris, clara = swarm(tmp_path, 0.0, 0.0, 0.0)
    anna.tell(1.0, made())
    refused = Received(sender=ANNA, id=HEADER, kind="header", signer=ANNA, round=12, check="size", detail="too large")
    boris.tell(1.1, refused)
    anna.tell(1.2, Sent(to=BORIS, id=HEADER, kind="header", outcome="refused", seconds=0.2, detail="size: too large"))
    anna.tell(1.2, Sent(to=CLARA, id=HEADER, kind="header", outcome="dropped", detail="too many records wait"))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA)
    assert "…BBBBBB refused it 1.100 s after the head (size: too large)." in answer
    assert "…CCCCCC never received it: it was not tried 1.200 s after the head: too many records wait." in answer
    anna.tell(20.1, Sent(to=CLARA, id=HEADER, kind="header", outcome="delivered", tries=2, seconds=0.1))
    (answer,) = told(diaries, "header", ANNA)
    assert "…CCCCCC took it, as …AAAAAA tells, but its own log does not show that." in answer
    clara.path.unlink()
    (answer,) = told(diaries[:2], "header", ANNA)
    assert "…CCCCCC after at most" in answer
    assert "its log is not here" in answer


def test_what_was_not_tried_is_told_with_what_had_failed_first(tmp_path: Path) -> None:
    diaries = anna, _, clara = swarm(tmp_path, 0.0, 0.0, 0.0)
    refused, hollow = f"cannot reach {BORIS}: connection refused", "the record before it could not be pushed either"
    backoff = f"cannot reach {BORIS}: it could not be reached a moment ago; it is tried again in a few seconds"
    anna.tell(-2.0, Sent(to=BORIS, id="claim", kind="claim", outcome="delivered"))
    anna.tell(-1.5, Sent(to=BORIS, id="vote", kind="precommit", outcome="failed", detail=refused))
    anna.tell(-1.0, Sent(to=BORIS, id="other", kind="prevote", outcome="failed", detail=backoff))
    anna.tell(1.0, made())
    anna.tell(1.2, Sent(to=BORIS, id=HEADER, kind="header", outcome="dropped", detail=hollow))
    anna.tell(1.2, Sent(to=CLARA, id=HEADER, kind="header", outcome="failed", detail=backoff.replace(BORIS, CLARA)))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA)
    assert (
        "…BBBBBB never received it: it was not tried 1.200 s after the head: the record before it could not be pushed "
        "either; first a push of a precommit had failed 1.500 s before the head: cannot reach …BBBBBB: connection "
        "refused."
    ) in answer
    assert "in a few seconds; what had failed first is not in its log of this round)." in answer
    hello = Contact(peer=CLARA, what="silent", reason=f"cannot reach {CLARA}: no route")
    anna.tell(0.5, hello)
    (answer,) = told(diaries, "header", ANNA)
    assert "first a hello had failed 0.500 s after the head: cannot reach …CCCCCC: no route)" in answer
    assert clara.peer not in answer


def test_what_was_pushed_nowhere_is_told_with_the_last_sign_of_its_receiver(tmp_path: Path) -> None:
    diaries = anna, boris, clara = swarm(tmp_path, 0.0, 0.0, 0.0)
    anna.tell(-3.0, Link(peer=BORIS, path="down"))
    anna.tell(1.0, made())
    anna.tell(1.5, Contact(peer=CLARA, what="silent", reason=f"cannot reach {CLARA}: no route"))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA)
    assert (
        "…AAAAAA pushed nothing of it there, so it did not count …BBBBBB among those who are there; the last that its "
        "log has of it is from 3.000 s before the head: lost its connection to …BBBBBB."
    ) in answer
    assert "it was not pushed there; 1.500 s after the head …AAAAAA noted: hello to …CCCCCC had no answer" in answer
    assert boris.peer not in answer and clara.peer not in answer


def test_a_terminal_gets_sentences_that_fit_and_a_pipe_one_line(
    tmp_path: Path, spes: Spes, monkeypatch: pytest.MonkeyPatch
) -> None:
    diaries = anna, *_ = swarm(tmp_path, 0.0, 0.0)
    for name in ("00000000", "11111111"):
        anna.tell(1.0, Said(kind="prevote", id=name, round=12, view=int(name[0]), value="abc"))
    close(diaries)
    words = ["events", *(diary.path for diary in diaries), "--why", f"vote:{ANNA[-6:]}"]
    plain = spes(*words).out
    assert len(plain.splitlines()) == 2
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    wrapped = spes(*words).out
    lines = wrapped.splitlines()
    assert max(map(len, lines)) <= 60 and lines.count("") == 1
    assert wrapped.split() == plain.split()


def test_why_a_header_was_never_made(tmp_path: Path) -> None:
    diaries = anna, *_ = swarm(tmp_path, 0.0, 0.0)
    anna.tell(0.5, Training(round=12, steps=8))
    anna.tell(2.0, TrainerEnded(code=-9, problem="killed by signal 9"))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA)
    assert answer.startswith("…AAAAAA made no header of round 12. Its log: 0.000 s after the head it saw its head")
    assert "2.000 s after the head it saw its trainer ended with code -9: killed by signal 9" in answer
    assert "Its log ends" not in answer
    assert told(diaries[1:], "header", ANNA) == [
        "No log here tells of a header of round 12 by …AAAAAA, whose own is not among them."
    ]


def test_a_peer_that_stood_still_is_told_apart(tmp_path: Path) -> None:
    diaries = anna, _, clara = swarm(tmp_path, 0.0, 0.0, 0.0)
    anna.tell(3.0, made())
    anna.tell(13.0, Sent(to=CLARA, id=HEADER, kind="header", outcome="failed", seconds=10.0, detail="no answer"))
    clara.tell(17.0, Training(round=12, steps=8))
    close(diaries)
    (answer,) = told(diaries, "header", ANNA, CLARA)
    assert "…CCCCCC never received it: one push failed" in answer
    assert "Its log is silent from 0.002 s to 17.000 s." in answer


def test_a_peer_that_died_in_the_round_is_told_apart(tmp_path: Path) -> None:
    diaries = anna, boris = swarm(tmp_path, 0.0, 0.0)
    boris.tell(3.0, made())
    for at, tries, problem in ((4.0, 1, "connection refused"), (9.0, 4, "tried a moment ago")):
        boris.tell(at, Sent(to=ANNA, id=HEADER, kind="header", outcome="failed", tries=tries, detail=problem))
    close([boris])
    (answer,) = told(diaries, "header", ANNA)
    assert answer.endswith("Its log ends 0.000 s after the head.")
    (answer,) = told(diaries, "header", BORIS)
    assert "(connection refused; then tried a moment ago)" in answer
    assert answer.endswith("It was not running at 3.000 s, or wrote nothing: its last line is from 0.000 s.")
    assert anna.peer not in answer


def test_each_vote_has_its_answer(tmp_path: Path) -> None:
    diaries = anna, boris = swarm(tmp_path, 0.0, 0.0)
    for at, kind, view in ((4.0, "prevote", 0), (5.0, "precommit", 0), (9.0, "prevote", 1)):
        name = f"{view}{kind}"
        anna.tell(at, Said(kind=kind, id=name, round=12, view=view, value="" if view else "set"))
        if kind == "prevote":
            passes(at, name, anna, boris, kind=kind)
    close(diaries)
    first, second, third = told(diaries, "vote", ANNA)
    assert "its prevote of round 12 in view 0 for set" in first
    assert "It reached …BBBBBB" in first
    assert "its precommit of round 12 in view 0 for set" in second
    assert "…BBBBBB never received it: …AAAAAA pushed nothing of it there" in second
    assert "its prevote of round 12 in view 1 for nil" in third


def test_why_a_blob_did_not_arrive(tmp_path: Path) -> None:
    diaries = anna, boris, clara = swarm(tmp_path, 0.0, 0.0, 0.0)
    anna.tell(1.0, made())
    for number, diary in enumerate((boris, clara)):
        passes(1.1, HEADER, anna, diary)
        diary.tell(1.2, BlobAsked(blob="b" * 16, signer=ANNA, section="group/1", bytes=100))
        diary.tell(1.3, BlobRefused(blob="b" * 16, holder=ANNA, reason=f"cannot reach {ANNA}: timeout"))
        if number:
            diary.tell(1.4, BlobRefused(blob="b" * 16, holder=BORIS, reason="not_held: b"))
            diary.tell(6.0, BlobFailed(blob="b" * 16, signer=ANNA, seconds=4.8, reason="stopped"))
        else:
            holders = (CLARA,)
            diary.tell(2.0, BlobCame(blob="b" * 16, signer=ANNA, holders=holders, bytes=100, seconds=0.8))
    close(diaries)
    (answer,) = told(diaries, "blob", ANNA)
    assert "Others asked for its blobs: group/1 bbbbbbbb of 100 bytes." in answer
    assert "It reached …BBBBBB 2.000 s after the head, in 0.800 s from …CCCCCC." in answer
    assert "…CCCCCC lacks group/1 bbbbbbbb, asked for 1.200 s after the head, given up 6.000 s after the head" in answer
    assert "(…AAAAAA: cannot reach …AAAAAA: timeout; …BBBBBB: not_held: b)" in answer


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_table_json_and_an_answer(tmp_path: Path, spes: Spes) -> None:
    diaries = swarm(tmp_path, 0.0, 100.0, 0.0)
    exchange(diaries)
    close(diaries)
    folders = [diary.path.parent for diary in diaries]
    shown = spes("events", *folders)
    assert shown.code == 0
    assert "run abababababababab, round 12: 20.0" in shown.out
    assert all(peer in shown.out for peer in PEERS)
    assert "-100.00" in shown.out
    assert "+1.000  …AAAAAA  made its header 0000000000000000 of round 12" in shown.out
    value = spes("events", *folders, "--round", 12, "--json").json
    assert [event["peer"] for event in value["events"] if event["event"] == "header"] == list(PEERS)
    assert value["clocks"][1]["offset_seconds"] - value["clocks"][0]["offset_seconds"] == pytest.approx(-100, abs=0.02)
    mine = spes("events", *folders, "--peer", "CCCC", "--json").json
    assert 0 < len(mine["events"]) < len(value["events"])
    assert all(CLARA in str(event) for event in mine["events"])
    asked = spes("events", *folders, "--why", "header:…AAAAAA")
    assert asked.out.startswith("…AAAAAA made its header of round 12")
    assert len(asked.out.splitlines()) == 1
    (answer,) = spes("events", *folders, "--why", f"header:{ANNA}", "--json").json["answers"]
    assert {fate["peer"] for fate in answer["peers"]} == {BORIS, CLARA}


def test_text_of_others_cannot_drive_the_terminal(tmp_path: Path, spes: Spes) -> None:
    (diary,) = swarm(tmp_path, 0.0)
    hostile = "\x1b[2J[bold]\u202e"
    diary.tell(1.0, Received(sender=BORIS, id="1" * 16, kind=hostile, check="size", detail=hostile, round=12))
    close([diary])
    shown = spes("events", diary.path)
    assert shown.code == 0
    assert "[bold]" in shown.out
    assert "\x1b" not in shown.out
    assert "\u202e" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["events", "{}/nothing"], "there is no .*/nothing: name the home"),
        (["events", "{}/empty"], "no event log in .*/empty: a peer writes events.jsonl"),
        (["events", "{}/foreign"], "is no event log of a peer: none of its 1 lines says whose it is"),
        (["events", "{}/A", "{}/C"], "these logs are of different runs: .*/A.* is of run abababababababab; "),
        (["events", "{}/A", "--round", "99"], "no log here tells of a head before round 99: .* round 11 to 13"),
        (["events", "{}/A", "--peer", "ZZZZ"], "no peer here ends in 'ZZZZ': give .* letters of …AAAAAA"),
        (["events", "{}/A", "--peer", "A"], "'A' is too short for a peer"),
        (["events", "{}/A", "--why", "header"], "argument --why: 'header': expected one of header, proposal"),
        (["events", "{}/blank"], "blank/events.jsonl is empty: nothing has happened there yet"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_one_clear_line(tmp_path: Path, spes: Spes, arguments: list[str], message: str) -> None:
    close(swarm(tmp_path, 0.0))
    Diary(tmp_path, CLARA, run="cd" * 32).tell(0.0, head(12))
    for name, text in (("empty", None), ("foreign", "hello\n"), ("blank", "")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "events.jsonl").write_text(text)
    result = spes(*(argument.format(tmp_path) for argument in arguments))
    assert result.code == 2
    with pytest.raises(UserError, match=message):
        raise UserError(result.error)


def test_a_home_is_looked_through_for_its_run(tmp_path: Path, spes: Spes) -> None:
    (diary,) = swarm(tmp_path, 0.0)
    close([diary])
    home = tmp_path / "home"
    for run in (RUN, "cd" * 32):
        (home / "runs" / run).mkdir(parents=True)
    (home / "runs" / RUN / "events.jsonl").write_bytes(diary.path.read_bytes())
    assert spes("events", home).code == 0
    (home / "runs" / ("cd" * 32) / "events.1.jsonl").write_bytes(diary.path.read_bytes())
    assert "holds the logs of 2 runs: name one of them" in spes("events", home).error
    (home / "pin").write_text(RUN)
    assert spes("events", home).code == 0
