"""The pure parts of `benchmarks/wan.py`: its delay line, its pace, and what it reads from event logs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.store.events import Life, Line
from spes_protocols.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import wan
from emulated.line import QUEUE_SECONDS, Downlink, Switch
from emulated.paced import paced_command, rest

FULL_SIZE = 368_990_160
"""A contribution's bytes, by `spes plan --preset 1b --nodes 4`."""


def test_a_frame_comes_after_the_delay_and_behind_the_one_before_it() -> None:
    line = Downlink(0.025, 8000.0)
    first, second = b"a" * 10, b"b" * 10
    assert line.due == float("inf")
    assert line.push(5.0, first) and line.push(5.0, second)
    assert line.due == pytest.approx(5.035)  # ten bytes take 10 ms
    assert line.pop(5.03) == []
    assert line.pop(5.04) == [first]
    assert line.pop(5.05) == [second]
    assert line.push(6.0, first)
    assert line.due == pytest.approx(6.035), "an idle line has nothing to catch up with"


def test_a_full_queue_loses_frames_and_takes_them_again_later() -> None:
    line = Downlink(0.0, 8000.0)
    taken = sum(line.push(0.0, b"x" * 10) for _ in range(100))
    assert taken == pytest.approx(QUEUE_SECONDS / 0.010 + 1, abs=1)
    assert len(line.pop(10.0)) == taken
    assert line.push(10.0, b"x")


def test_the_switch_learns_where_an_address_is() -> None:
    lines = [Downlink(0.0, 1e9) for _ in range(3)]
    switch = Switch(lines)
    ann, bob, everybody = b"A" * 6, b"B" * 6, b"\xff" * 6
    switch.push(0.0, 0, everybody + ann + b"who is bob")
    assert [len(line.pop(1.0)) for line in lines] == [0, 1, 1]
    switch.push(1.0, 1, ann + bob + b"I am")
    assert [len(line.pop(2.0)) for line in lines] == [1, 0, 0]
    switch.push(2.0, 0, bob + ann + b"hello")
    assert [len(line.pop(3.0)) for line in lines] == [0, 1, 0]


def test_only_the_trainers_command_is_replaced() -> None:
    replaced = paced_command(("python", "-m", "spes_p2p.train", "--threads", "1"), 240.0)
    assert replaced[0] == "python" and replaced[2:] == ("trainer", "240.0", "--threads", "1")
    assert Path(replaced[1]).name == "paced.py"
    other = ("python", "-m", "spes_p2p.peer.worker", "--threads", "1")
    assert paced_command(other, 240.0) == other


def test_a_pause_ends_at_its_time_or_when_training_is_cut_short() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rest(1.5, lambda: False, lambda: now[0], sleep)
    assert now[0] == pytest.approx(1.5)
    rest(9.0, lambda: now[0] >= 3.0, lambda: now[0], sleep)
    assert now[0] == pytest.approx(3.0, abs=0.3)


def life(peer: str, *lines: tuple[float, str, dict[str, Any]]) -> Life:
    """A log whose steady clock began at 1000 s, with events at so many seconds."""
    return Life(
        peer=peer, run="r", version="1", started_at=0, started=1000.0,
        lines=[Line(0, 1000.0 + at, event, fields) for at, event, fields in lines],
    )  # fmt: skip


OWN = (
    (10.0, "training", {"round": 4, "steps": 24}),
    (260.0, "trained", {"round": 4, "steps": 24, "seconds": 240.0}),
    (261.0, "header", {"round": 4, "bytes": 77}),
    (300.0, "blob_came", {"signer": "bob"}),
    (340.0, "blob_came", {"signer": "bob"}),
    (342.0, "checked", {"round": 4}),
    (343.0, "view", {"round": 4, "view": 0}),
    (344.0, "view", {"round": 4, "view": 1}),
    (346.0, "applied", {"round": 4, "seconds": 3.0}),
    (347.0, "head", {"round": 5, "how": "agreement"}),
    (347.5, "training", {"round": 5, "steps": 24}),
)
OTHER = (
    (5.0, "blob_came", {"signer": "ann"}),
    (330.0, "blob_came", {"signer": "ann"}),
    (335.0, "blob_came", {"signer": "cy"}),
)


def test_a_rounds_time_is_split_by_its_events() -> None:
    ann, bob = life("ann", *OWN), life("bob", *OTHER)
    (found,) = wan.rounds_of(ann, [ann, bob])
    assert found.wall == 337.5
    assert found.phases == {
        "train": 240.0, "encode": 11.0, "transfer": 79.0, "check": 2.0, "agree": 2.0, "apply": 3.0, "next": 0.5,
    }  # fmt: skip
    assert sum(found.phases.values()) == found.wall
    assert (found.contribution_bytes, found.upload) == (77, 69.0), "bob's of the round before is another's"
    assert found.views == 2.0
    assert wan.rounds_of(bob, [ann, bob]) == []


@pytest.mark.parametrize("missing", ["trained", "header", "head"])
def test_a_round_that_was_not_contributed_to_does_not_count(missing: str) -> None:
    ann = life("ann", *(each for each in OWN if each[1] != missing))
    assert wan.rounds_of(ann, [ann]) == []


def test_without_an_event_of_it_apply_is_part_of_the_agreement() -> None:
    ann = life("ann", *(each for each in OWN if each[1] != "applied"))
    (found,) = wan.rounds_of(ann, [ann])
    assert (found.phases["agree"], found.phases["apply"]) == (5.0, 0.0)
    assert sum(found.phases.values()) == found.wall


def test_no_round_at_all_is_an_error() -> None:
    with pytest.raises(UserError, match="no peer finished"):
        wan.mean([])


def test_arithmetic_is_computed_at_full_size_and_the_line_is_not() -> None:
    ann = life("ann", *OWN)
    measured = wan.mean(wan.rounds_of(ann, [ann]))
    planned = {"parameters_trained": 500_000_000, "apply_seconds": 34.0}
    full = wan.at_full_size(measured, planned, encode_seconds=0.5, scale=20.0)
    assert full == measured.phases | {"encode": 10.0 + 12.0, "check": 40.0, "apply": 34.0}


def test_with_overlap_a_cycle_is_training_or_what_goes_on_beside_it() -> None:
    ann = life(
        "ann",
        (100.0, "trained", {"round": 0, "seconds": 90.0}),
        (350.0, "trained", {"round": 1, "seconds": 240.0}),
        (900.0, "trained", {"round": 3, "seconds": 240.0}),
    )
    cycles = wan.cycles_of(ann)
    assert cycles == [wan.Cycle(wall=250.0, train=240.0)], "round 2 was missed"
    full = {"encode": 10.0, "transfer": 80.0, "check": 5.0, "agree": 5.0, "apply": 30.0}
    found = wan.overlapped(cycles, full, taking_in=10.0)
    assert (found["utilisation_as_measured"], found["full_size_wall_seconds"]) == (0.96, 250.0)
    assert wan.overlapped(cycles, full | {"transfer": 300.0}, taking_in=1.0)["full_size_wall_seconds"] == 351.0
    with pytest.raises(UserError, match="two rounds in turn"):
        wan.overlapped([], full, taking_in=0.0)


@pytest.mark.parametrize("lag", [0, 1])
def test_one_of_the_two_utilisations_is_measured_and_the_other_says_how(lag: int) -> None:
    ann = life("ann", *OWN, (600.0, "trained", {"round": 5, "seconds": 240.0}))
    measured = wan.Measured(
        rounds=wan.rounds_of(ann, [ann]),
        cycles=wan.cycles_of(ann),
        bytes_sent=1.0,
        bytes_received=2.0,
        load_average=0.0,
        own_part=1.0,
        last_rounds=wan.rounds_of(ann, [ann]),
        last_bytes_sent=1.0,
    )
    planned = {"parameters_trained": 500_000_000, "apply_seconds": 34.0}
    planned["traffic_bytes_per_round"] = dict.fromkeys(("contribution", "sent", "received"), 7)
    figures = wan.figures_of(
        measured, planned, scale=20.0, train_seconds=240.0, encode=0.1, taking_in=0.1, lag=lag, faster=1.0, slow=0.5
    )
    here, other = ("utilisation_overlap", "utilisation") if lag else ("utilisation", "utilisation_overlap")
    assert 0 < figures[here] < 1 and figures[here + "_reason"] == ""
    assert figures[other] is None and f"--lag {1 - lag}" in figures[other + "_reason"]
    assert len(wan._tables(figures)) == 3


@pytest.mark.parametrize("scale", [10, 20, 50, 100])
def test_the_small_model_sends_what_was_asked_for_in_the_full_ones_proportion(scale: int) -> None:
    model = wan.small_model(FULL_SIZE / scale)
    assert wan.contribution_bytes(model) * scale == pytest.approx(FULL_SIZE, rel=0.1)
    shared = wan.section_bytes(wan.section_specs(model, wan.PEERS, "shared"), "int4")
    assert shared / wan.contribution_bytes(model) == pytest.approx(wan.SHARED_SHARE, abs=0.05)


@pytest.mark.parametrize("words", [("--scale", "1"), ("--rounds", "0"), ("--train-seconds", "nan")])
def test_a_figure_out_of_range_is_refused(words: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wan.py", *words])
    with pytest.raises(UserError, match="--scale is 10 to 1000"):
        wan._main()
