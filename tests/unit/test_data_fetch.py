"""Fetching over real HTTP: resume, digests, sizes, faults, redirects, the guard at the socket."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_p2p.data import sources
from spes_p2p.data.sources import Fetcher, Limits, StoppedError
from spes_protocols.errors import UserError
from tests.unit.data_server import DataServer, serving

BODY = bytes(range(251)) * 20_000
DIGEST = hashlib.sha256(BODY).hexdigest()
LIMITS = Limits(connect_seconds=2, read_seconds=2, attempts_max=2, backoff_seconds=0.01, deadline_seconds=20)


@pytest.fixture
def server() -> Iterator[DataServer]:
    with serving(DataServer(files={"/a": BODY})) as started:
        yield started


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "a.part"
    path.touch()
    return path


def fetcher(*allow: str, limits: Limits = LIMITS) -> Fetcher:
    return Fetcher(allow=allow, report=lambda what, fraction: None, limits=limits)


def ranges(server: DataServer) -> list[str | None]:
    return [wanted for _, wanted in server.asked]


def test_a_file_arrives_whole_and_progress_is_told(server: DataServer, part: Path) -> None:
    heard: list[float] = []
    told = Fetcher(allow=(server.url,), report=lambda what, fraction: heard.append(fraction), limits=LIMITS)
    told.fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    assert ranges(server) == [None]
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_a_cut_connection_is_gone_on_from(server: DataServer, part: Path) -> None:
    server.cuts = [2_000_000, 2_000_000]
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    first, *later = ranges(server)
    assert first is None
    starts = [int(str(wanted).removeprefix("bytes=").removesuffix("-")) for wanted in later]
    # What the client had not yet read when the connection broke (a few buffers) is asked for again, not more.
    assert len(starts) == 2
    assert 1_000_000 < starts[0] <= 2_000_000
    assert starts[0] + 1_000_000 < starts[1] <= starts[0] + 2_000_000


def test_a_cut_connection_without_content_length_is_gone_on_from(server: DataServer, part: Path) -> None:
    server.tells_length = False
    server.cuts = [2_000_000]
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    assert ranges(server) == [None, "bytes=2000000-"]


def test_bytes_of_an_earlier_process_are_kept(server: DataServer, part: Path) -> None:
    part.write_bytes(BODY[:4_000_000])
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    assert ranges(server) == ["bytes=4000000-"]


def test_a_complete_part_needs_no_request(server: DataServer, part: Path) -> None:
    part.write_bytes(BODY)
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert not server.asked


def test_a_server_without_ranges_starts_again(server: DataServer, part: Path) -> None:
    server.knows_ranges = False
    server.cuts = [2_000_000]
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    first, second = ranges(server)
    assert first is None
    assert second is not None


def test_a_server_without_ranges_that_never_gets_further_is_given_up(server: DataServer, part: Path) -> None:
    server.knows_ranges = False
    server.cuts = [1000] * 100
    with pytest.raises(UserError, match="of 5020000 bytes came") as caught:
        fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert "\n" not in str(caught.value)
    assert LIMITS.attempts_max <= len(server.asked) < 10


def test_pieces_that_do_not_fit_are_fetched_once_more_in_one_go(server: DataServer, part: Path) -> None:
    part.write_bytes(b"x" * 1000)
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    assert ranges(server) == ["bytes=1000-", None]


def test_a_part_that_is_too_long_is_fetched_anew(server: DataServer, part: Path) -> None:
    part.write_bytes(BODY + b"x")
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY


def test_wrong_bytes_are_refused_and_not_kept(server: DataServer, part: Path) -> None:
    server.files["/a"] = b"x" + BODY[1:]
    with pytest.raises(UserError, match=f"digest is [0-9a-f]{{64}} instead of {DIGEST}; ask") as caught:
        fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert "\n" not in str(caught.value)
    assert part.read_bytes() == b""
    assert len(server.asked) == 1


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_longer_file_is_refused(server: DataServer, part: Path, tells_length: bool) -> None:
    server.tells_length = tells_length
    with pytest.raises(UserError, match="instead of 5000000"):
        fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, 5_000_000)
    assert part.stat().st_size <= 5_000_000


def test_a_shorter_file_is_refused(server: DataServer, part: Path) -> None:
    with pytest.raises(UserError, match="has 5020000 bytes instead of 6000000"):
        fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, 6_000_000)
    assert len(server.asked) == 1


def test_a_missing_file_is_not_tried_again(server: DataServer, part: Path) -> None:
    with pytest.raises(UserError, match="no such file; check the URL"):
        fetcher(server.url).fetch(part, f"{server.url}/b", DIGEST, len(BODY))
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_tried_again(server: DataServer, part: Path, status: int) -> None:
    server.statuses = [status]
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY


def test_a_silent_server_is_given_up_and_its_bytes_are_kept(server: DataServer, part: Path) -> None:
    server.gate = threading.Event()
    hasty = Limits(read_seconds=0.2, attempts_max=1, backoff_seconds=0.01, deadline_seconds=20)
    server.knows_ranges = False
    with pytest.raises(UserError, match="cannot read"):
        fetcher(server.url, limits=hasty).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert 0 < part.stat().st_size < len(BODY)


def test_the_whole_of_a_fetch_has_a_deadline(server: DataServer, part: Path) -> None:
    server.cuts = [1] * 1000
    hurried = Limits(backoff_seconds=0.2, deadline_seconds=0.5, bytes_per_second_min=10**9, attempts_max=1000)
    with pytest.raises(UserError, match="of 5020000 bytes came"):
        fetcher(server.url, limits=hurried).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert len(server.asked) < 1000


def test_nobody_listening(part: Path) -> None:
    with serving() as gone:
        url = gone.url
    with pytest.raises(UserError, match="check the connection"):
        fetcher(url).fetch(part, f"{url}/a", DIGEST, len(BODY))


def test_a_fetch_can_be_stopped_and_goes_on_later(server: DataServer, part: Path) -> None:
    server.gate = threading.Event()
    stopped = fetcher(server.url)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            stopped.fetch(part, f"{server.url}/a", DIGEST, len(BODY))
        except StoppedError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert server.halfway.wait(10)
    stopped.stop.set()
    server.gate.set()
    thread.join(10)
    assert outcome
    have = part.stat().st_size
    assert have < len(BODY)
    server.gate = None
    fetcher(server.url).fetch(part, f"{server.url}/a", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    assert ranges(server)[-1] == (f"bytes={have}-" if have else None)


def test_redirects_are_followed_where_every_hop_is_allowed(server: DataServer, part: Path) -> None:
    server.redirects = {"/x": "/y", "/y": f"{server.url}/a"}
    server.cuts = [1_000_000]
    fetcher(server.url).fetch(part, f"{server.url}/x", DIGEST, len(BODY))
    assert part.read_bytes() == BODY


def test_a_redirect_to_where_nobody_allowed_it_is_refused(server: DataServer, part: Path) -> None:
    with serving(DataServer(files={"/a": BODY})) as home:
        for target in (f"{home.url}/a", "https://127.0.0.1:1/a", "file:///etc/passwd", "//127.0.0.1:1/a"):
            server.redirects = {"/x": target}
            with pytest.raises(UserError, match="--allow-source"):
                fetcher(server.url).fetch(part, f"{server.url}/x", DIGEST, len(BODY))
        assert not home.asked


def test_a_redirect_loop_ends(server: DataServer, part: Path) -> None:
    server.redirects = {"/x": "/x"}
    with pytest.raises(UserError, match="redirects more than"):
        fetcher(server.url).fetch(part, f"{server.url}/x", DIGEST, len(BODY))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_connection_is_made_to_a_private_address(
    server: DataServer, part: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A name that was public when it was checked and leads home when it is used."""
    monkeypatch.setattr(sources, "_check_host", lambda url, parts: None)
    port = server.url.rpartition(":")[2]
    with pytest.raises(UserError, match="no public address"):
        fetcher().fetch(part, f"https://{host}:{port}/a", DIGEST, len(BODY))
    assert not server.asked


def test_the_guarded_connection_carries_what_it_lets_through(
    server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same client as for public addresses, with the loopback declared one."""
    looked_at: list[str] = []
    monkeypatch.setattr(sources, "is_public", lambda address: looked_at.append(address) or True)
    with sources._http(False).open(f"{server.url}/a", "rb", block_size=0, size=len(BODY)) as file:
        assert file.read(1 << 16) == BODY[: file.tell()]
    assert looked_at == ["127.0.0.1"]


def test_local_files_by_path_and_url(tmp_path: Path, part: Path) -> None:
    (tmp_path / "a b").write_bytes(BODY)
    for url in (f"{tmp_path}/a%20b", f"file://{tmp_path}/a b"):
        with pytest.raises(UserError):
            fetcher(str(tmp_path)).fetch(part, url, DIGEST, len(BODY))
    part.write_bytes(BODY[:1000])
    fetcher(str(tmp_path)).fetch(part, f"file://{tmp_path}/a%20b", DIGEST, len(BODY))
    assert part.read_bytes() == BODY
    part.write_bytes(b"")
    with pytest.raises(UserError, match="instead of 7"):
        fetcher(str(tmp_path)).fetch(part, f"file://{tmp_path}/a%20b", DIGEST, 7)


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_s3_without_its_package_says_what_to_install(part: Path) -> None:
    with pytest.raises(UserError, match="pip install s3fs"):
        fetcher().fetch(part, "s3://bucket/a", DIGEST, len(BODY))
