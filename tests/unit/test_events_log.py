"""The event log survives what happens to files: full disks, torn lines, rotation, rubbish."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.peer.events import VOCABULARY, HeadMoved, Sent, parse, plain
from spes_p2p.store.events import LINE_BYTES_MAX, EventLog, older, read_events
from spes_protocols.errors import UserError

WHOSE = {"peer": "12D3KooWme", "run": "ab" * 32, "version": "1"}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full once a file has this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def numbers(path: Path) -> list[int]:
    """What `write_number` wrote, as the reader finds it."""
    return [line.fields["number"] for life in read_events(path).lives for line in life.lines]


def write_numbers(log: EventLog, *wanted: int) -> None:
    for number in wanted:
        log.write("noted", {"number": number})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE)
    log.write("head", {"round": 3, "id": "ab", "holders": ["x", "y"]})
    log.close()
    (life,) = read_events(path).lives
    assert (life.peer, life.run, life.version) == (WHOSE["peer"], WHOSE["run"], "1")
    (line,) = life.lines
    assert (line.event, line.fields) == ("head", {"round": 3, "id": "ab", "holders": ["x", "y"]})
    assert life.started_at <= line.at
    assert abs(life.seconds(line) - line.at / 1000) < 5
    assert log.dropped == 0


def test_each_start_is_a_life_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(3):
        log = EventLog(path, WHOSE)
        write_numbers(log, number)
        log.close()
        write_numbers(log, number + 10)  # opens the file again: still the same start
        log.close()
    lives = read_events(path).lives
    assert [[line.fields["number"] for line in life.lines] for life in lives] == [[0, 10], [1, 11], [2, 12]]


def test_two_files_of_bounded_size_keep_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE, bytes_max=4000)
    write_numbers(log, *range(500))
    assert path.stat().st_size <= 4000
    assert older(path).stat().st_size <= 4000
    kept = numbers(path)
    assert kept == list(range(500 - len(kept), 500))
    assert len(kept) > 50
    assert len(read_events(path).lives) == 1
    assert read_events(path).skipped == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["events.1.jsonl", "events.jsonl"]


def test_a_file_too_large_at_the_start_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_numbers(EventLog(path, WHOSE), *range(100))
    write_numbers(EventLog(path, WHOSE, bytes_max=1000), 100)
    assert numbers(path) == list(range(101))
    assert path.stat().st_size < 1000 < older(path).stat().st_size


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_a_torn_last_line_spoils_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    write_numbers(EventLog(path, WHOSE), 0, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    write_numbers(EventLog(path, WHOSE), 2)
    log = read_events(path)
    assert [line.fields["number"] for life in log.lives for line in life.lines] == ([0, 1, 2] if cut == 1 else [0, 2])
    assert log.skipped == (0 if cut == 1 else 1)


def test_a_full_disk_drops_events_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE)
    write_numbers(log, 0)
    with files_of_at_most(path.stat().st_size + 30):
        write_numbers(log, 1, 2, 3)
    assert log.dropped == 3
    write_numbers(log, 4)
    found = read_events(path)
    assert numbers(path) == [0, 4]
    assert (found.lost, found.skipped) == (3, 1)  # the part of a line that still fitted is no event


def test_a_disk_that_is_full_at_the_start_is_no_obstacle_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE)
    with files_of_at_most(10):
        write_numbers(log, 0)
    write_numbers(log, 1)
    assert numbers(path) == [1]
    assert read_events(path).lost == 1


@pytest.mark.parametrize("obstacle", ["directory", "missing"])
def test_a_log_that_cannot_be_opened_harms_nobody(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "events.jsonl" if obstacle == "directory" else tmp_path / "gone" / "events.jsonl"
    if obstacle == "directory":
        path.mkdir()
    log = EventLog(path, WHOSE)
    write_numbers(log, 0, 1)
    assert log.dropped == 2
    if obstacle == "directory":
        path.rmdir()
    else:
        path.parent.mkdir()
    write_numbers(log, 2)
    assert numbers(path) == [2]


def test_an_event_too_long_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE)
    log.write("noted", {"line": "x" * LINE_BYTES_MAX})
    write_numbers(log, 1)
    assert (log.dropped, numbers(path)) == (1, [1])


RUBBISH = [
    b"\xff\xfe\x00",
    b"[" * 3000,
    b"{}",
    b"null",
    b'{"at":1,"mono":1e999,"event":"x"}',
    b'{"at":1.5,"mono":1,"event":"x"}',
    b'{"at":true,"mono":1,"event":"x"}',
    b'{"at":1,"mono":1,"event":["x"]}',
    b'{"at":1,"mono":1,"event":"x","deep":{"a":1}}',
    b'{"at":1,"mono":1,"event":"x","long":[' + b'"",' * 100 + b'""]}',
    b'{"at":1,"mono":1,"event":"log","peer":"x"}',
    b'{"at":1,"mono":1,"event":"x","y":"' + b"z" * (2 * LINE_BYTES_MAX) + b'"}',
    b"9" * 3000,
]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_between_lines_is_counted_and_passed_over(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, WHOSE)
    write_numbers(log, 0)
    with path.open("ab") as file:
        file.write(rubbish + b"\n")
    write_numbers(log, 1)
    found = read_events(path)
    assert [line.fields.get("number") for line in found.lives[0].lines] == [0, 1]
    assert found.skipped >= 1


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_any_bytes_are_a_log_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("any") / "events.jsonl"
    path.write_bytes(b"\n".join(parts))
    lines = [part for part in b"\n".join(parts).split(b"\n") if part]
    if not lines:
        assert read_events(path).lives == []
        return
    with pytest.raises(UserError, match="is no event log of a peer"):
        read_events(path)


def test_a_log_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no event log at"):
        read_events(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        read_events(tmp_path)


def test_a_log_of_another_version_is_named_as_that(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = {"at": 1, "mono": 1.0, "event": "log", "format": 2, "peer": "a", "run": "b", "when": 3}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="was written by a newer version of this program"):
        read_events(path)
    path.write_text(json.dumps(line | {"format": "1"}) + "\n")
    with pytest.raises(UserError, match="is no event log"):
        read_events(path)


# ---- the vocabulary --------------------------------------------------------------------------------------------------

HEAD = HeadMoved(round=3, id="ab", epoch="cd", root="ef", how="agreement")
SENT = Sent(to="12D3KooWyou", id="ab", kind="header", outcome="failed", tries=4, seconds=1.0, detail="refused")


@pytest.mark.parametrize("event", [HEAD, SENT])
def test_an_event_survives_its_line(event: HeadMoved | Sent) -> None:
    fields = json.loads(json.dumps(plain(event)))
    assert parse(event.NAME, fields) == event
    assert parse(event.NAME, fields | {"later": "versions may say more"}) == event


def test_every_event_has_a_name_of_its_own() -> None:
    assert "" not in VOCABULARY
    assert len(VOCABULARY) == len({kind.__name__ for kind in VOCABULARY.values()}) > 20


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("nonsense", {}),
        ("head", plain(HEAD) | {"round": "3"}),
        ("head", plain(HEAD) | {"round": True}),
        ("head", {key: value for key, value in plain(HEAD).items() if key != "id"}),
        ("sent", plain(SENT) | {"to": ["x"]}),
        ("blob_came", {"blob": "a", "signer": "b", "holders": "c", "bytes": 1, "seconds": 1.0}),
    ],
)
def test_what_is_no_event_is_told_apart(name: str, fields: dict[str, object]) -> None:
    assert parse(name, fields) is None
