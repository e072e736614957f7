"""The live view, rendered to text: it fits, it says what there is to say, and it survives what is missing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from spes_client.ui import fingerprint
from spes_client.view import plain_line, render
from spes_protocols.control_pb2 import LinkStatus, LossPoint, MemberStatus, StatusReply

IDS = ["12D3KooW" + letter * 44 for letter in "ABCDEFGHJKLMNPQRSTUV"]


def sample(groups: int = 16, peers: int = 5, rounds: int = 12) -> StatusReply:
    """A run in progress: the last peer stands by, group 7 is vacant, the third peer missed a round and is relayed."""
    owners = max(1, peers - 1)
    members = [
        MemberStatus(
            peer=peer,
            groups=[g for g in range(groups) if g % owners == i and g != 7] if i < owners else [],
            missed=int(i == 2),
            me=i == 0,
        )
        for i, peer in enumerate(IDS[:peers])
    ]
    return StatusReply(
        run_name="tiny-demo",
        run_id="ab12" * 16,
        organizer=IDS[-1],
        peer_id=IDS[0],
        phase="training",
        round=rounds,
        state_root="cd" * 32,
        step=13,
        steps=20,
        loss=3.2141,
        tokens_per_second=4321.0,
        tokens=1_234_567,
        members=members,
        links=[LinkStatus(peer=p, path="relayed" if i == 1 else "direct") for i, p in enumerate(IDS[1:peers])],
        losses=[LossPoint(round=i, train=3 + 5 * math.exp(-i / 4)) for i in range(rounds)],
        bytes_up=12_345_678,
        bytes_down=45_600_000,
        trainer="running",
        trainer_pid=4321,
        groups_total=groups,
        progress=-1.0,
        addresses=["/ip4/10.0.0.1/tcp/31337/p2p/" + IDS[0]],
    )


def text(status: StatusReply, width: int, height: int) -> list[str]:
    """The view as lines of text; that it fits is checked here."""
    console = Console(width=width, height=height)
    with console.capture() as capture:
        console.print(render(status, width=width, height=height))
    lines = capture.get().splitlines()
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (60, 20)])
def test_a_run_in_progress_is_all_there(width: int, height: int) -> None:
    lines = text(sample(), width, height)
    shown = "\n".join(lines)
    assert "tiny-demo" in lines[0]
    for words in (
        "run ab12ab12ab12ab12",
        f"organizer {fingerprint(IDS[-1])}"[:30],
        "trainer running pid 4321",
        "round 12  training",
        "13/20 steps",
        "3.2141",
        "4321 tokens/s",
        "1.23 M by everybody",
        "3 direct, 1 relayed",
        "4  mine  11 others'  1 vacant",
        "[ 0]  1   2   3 [ 4]  5   6   · [ 8]",
        "8.000",
        "round 0",
        "Ctrl-C",
    ):
        assert words in shown
    bar = next(line for line in lines if "13/20" in line)
    full, rest = bar.count("━"), bar.count("─")
    assert full / (full + rest) == pytest.approx(13 / 20, abs=0.05)
    if height >= 24:
        for words in ("12.3 MB", "45.6 MB", "cdcdcdcdcdcdcdcd", "…AAAAAA         0  me       0 4 8 12", "standby"):
            assert words in shown
        members = [line for line in lines if line.startswith("│ …")]
        assert [line[3:9] for line in members[:2]] == ["AAAAAA", "CCCCCC"]  # me, then who missed a round
        assert "1  relayed  2 6 10 14" in members[1]


def test_the_curve_falls_from_left_to_right() -> None:
    lines = text(sample(), 80, 24)
    columns = {
        column: row
        for row, line in enumerate(lines)
        for column, character in enumerate(line)
        if 0x2800 < ord(character) < 0x2900
    }
    heights = [columns[column] for column in sorted(columns)]
    assert heights == sorted(heights)
    assert heights[0] < heights[-1]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([], "the curve begins with the first commit"),
        ([(0, 4.0)], "4.000"),
        ([(0, 4.0), (1, 4.0)], "4.000"),
        ([(0, math.nan), (1, math.inf), (2, 5.0)], "5.000"),
        ([(i, 9.0 - i / 1000) for i in range(5000)], "4999"),
    ],
)
def test_curves_of_any_length(losses: list[tuple[int, float]], words: str) -> None:
    status = sample()
    del status.losses[:]
    status.losses.extend(LossPoint(round=r, train=v) for r, v in losses)
    assert words in "\n".join(text(status, 80, 24))


def test_nothing_is_known_yet() -> None:
    shown = "\n".join(text(StatusReply(), 80, 24))
    assert "no run yet" in shown and "starting" in shown and "not a member yet" in shown
    joining = StatusReply(phase="joining", progress=0.45, progress_text="fetching the state")
    shown = "\n".join(text(joining, 80, 24))
    assert "joining  fetching the state" in shown and "45%" in shown


def test_many_groups_and_members_say_what_is_left_out() -> None:
    status = sample(groups=1024, peers=19)
    shown = "\n".join(text(status, 80, 24))
    assert "(the first 380 of 1024)" in shown
    assert "and 19 more" in shown or "and 18 more" in shown
    wide = "\n".join(text(sample(groups=64, peers=19), 120, 40))
    assert "[ 0]" in wide and " 63 " in wide


def test_errors_and_leaving_are_said_at_the_bottom() -> None:
    status = sample()
    status.last_error = "blob \x1b[31m\nrefused"
    status.phase = "leaving"
    lines = text(status, 80, 24)
    assert "! blob [31m refused" in lines[-3]
    assert "Ctrl-C again leaves at once" in lines[-2]
    assert "\x1b" not in "".join(lines)


def test_watching_does_not_promise_that_ctrl_c_leaves() -> None:
    console = Console(width=80, height=24)
    with console.capture() as capture:
        console.print(render(sample(), width=80, height=24, watching=True))
    assert "Ctrl-C stops watching, the peer goes on" in capture.get()
    assert "leaves after" not in capture.get()


words = st.text(max_size=30)


@given(
    name=words,
    phase=st.sampled_from(["", "training", "paused", "odd"]),
    error=words,
    groups=st.integers(0, 1100),
    peers=st.integers(0, 20),
    rounds=st.integers(0, 300),
    step=st.integers(0, 50),
    progress=st.floats(-1, 2),
    width=st.integers(40, 200),
    height=st.integers(10, 70),
)
def test_it_always_fits(
    name: str,
    phase: str,
    error: str,
    groups: int,
    peers: int,
    rounds: int,
    step: int,
    progress: float,
    width: int,
    height: int,
) -> None:
    status = sample(groups, peers, rounds)
    status.run_name, status.phase, status.last_error = name, phase, error
    status.step, status.progress, status.progress_text = step, progress, name
    lines = text(status, width, height)
    assert len(lines) == height
    assert lines[-1].startswith("╰") and lines[0].startswith("╭")


def test_a_download_tells_its_rate_and_the_time_left() -> None:
    status = StatusReply(
        phase="joining", progress=0.45, progress_text="fetching the state", progress_bytes_per_second=12.3e6,
        progress_seconds_left=3700.0,
    )  # fmt: skip
    line = next(line for line in text(status, 120, 30) if "fetching the state" in line)
    assert "45%, 12.3 MB/s, 62 min left" in line
    assert plain_line(None, status) == "round 0 joining; fetching the state 45%, 12.3 MB/s, 62 min left"
    later = StatusReply()
    later.CopyFrom(status)
    later.progress = 0.49
    assert plain_line(status, later) is None
    later.progress, later.progress_seconds_left = 0.5, -1.0
    assert plain_line(status, later) == "fetching the state 50%, 12.3 MB/s"


def test_limits_of_the_line_stand_where_the_traffic_is() -> None:
    status = sample()
    status.limits = "up 10 Mbit/s until 23:00, down 1500 Mbit/s"
    status.limit_up_bytes_per_second = 1_250_000
    status.limit_down_bytes_per_second = 187_500_000
    shown = "\n".join(text(status, 80, 24))
    assert "sent      12.3 MB (max 10 Mbit/s)" in shown
    assert "received  45.6 MB (max 1500 " in shown
    assert "(max" not in "\n".join(text(sample(), 80, 24))
    assert plain_line(sample(), status) == "limits of the line: up 10 Mbit/s until 23:00, down 1500 Mbit/s"
    assert plain_line(status, status) is None
    assert plain_line(status, sample()) == "limits of the line: none"


def test_log_lines_tell_what_changed() -> None:
    status = sample()
    first = plain_line(None, status)
    assert first is not None
    for part in ("run tiny-demo ab12ab12ab12", "round 12 training", "my groups: 0 4 8 12", "trainer running"):
        assert part in first
    assert plain_line(status, status) is None

    later = StatusReply()
    later.CopyFrom(status)
    later.step, later.phase, later.tokens_per_second, later.bytes_up = 14, "collecting", 99.0, 5
    later.mfu = 0.314
    assert plain_line(status, later) is None

    later.round = 13
    later.losses.add(round=12, train=3.25)
    assert plain_line(status, later) == (
        "round 13 collecting, loss 3.2500 in round 12, 1.23 M tokens, 99 tokens/s, 31% MFU, peers 3 direct 1 relayed, "
        "up 5 B down 45.6 MB"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"trainer": "crashed"}, "trainer crashed"),
        ({"last_error": "no\nroute"}, "error: no route"),
        ({"progress_text": "tokenizing"}, "tokenizing"),
        ({"members": [MemberStatus(peer=p) for p in IDS[1:5]]}, "my groups: none; …AAAAAA left"),
    ],
)
def test_log_lines_of_single_changes(change: dict[str, object], line: str) -> None:
    status = sample()
    later = StatusReply()
    later.CopyFrom(status)
    for field in change:
        later.ClearField(field)  # type: ignore[arg-type]
    later.MergeFrom(StatusReply(**change))  # type: ignore[arg-type]
    assert plain_line(status, later) == line
