"""A peer's metrics: the text as Prometheus reads it, the server that gives it out, and what is measured for it."""

import asyncio
import math
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_bootstrap import main as bootstrap
from spes_client import join
from spes_p2p.core.members import Strength
from spes_p2p.peer import exporter, selfcheck
from spes_p2p.peer.exporter import CONNECTIONS_MAX, REQUEST_BYTES_MAX, Exporter, Gatherer, disk_used, listen_address
from spes_p2p.peer.metrics import Snapshot, families, page
from spes_protocols.errors import NetworkError, RemoteError, UserError
from tests.unit.log_support import ADA, BOB, RunLog

SNAPSHOT = Snapshot(
    version="0.1.0",
    run_id="ab" * 32,
    run_name="a run",
    peer_id="12D3KooWx",
    role="bootstrap",
    round=7,
    ready=True,
    halted=False,
    stalled=False,
    ended=False,
    tokens=2**53 + 1,
    commit_age_seconds=1.5,
    members={"owner": 4, "standby": 1},
    groups_owned=3,
    groups=4,
    peers={"volunteer": 5},
    bytes_up=10,
    bytes_down=20,
    daemon_restarts=1,
    started=1700000000.25,
    links={"direct": 3, "relayed": 2},
    rounds={"final": 6, "majority": 1, "any": 0},
    dht_records=9,
    disk={"blobs": 4096},
    disk_free=1 << 40,
    clock_offset_seconds=-0.01,
    checks={"clock": True, "relay": False},
    checked=1700000001.0,
    resident_bytes=1 << 20,
    open_files=30,
)

# ---- the text --------------------------------------------------------------------------------------------------------

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^\\"\n]|\\\\|\\"|\\n)*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL},?)*)\}})? (\S+)")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels, read by the rules of the format; whatever breaks one of them fails."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    kinds: dict[str, str] = {}
    seen: list[str] = []
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, meaning = line.removeprefix("# HELP ").partition(" ")
            assert name not in seen, f"{name} twice"
            assert meaning
            seen.append(name)
        elif line.startswith("# TYPE "):
            name, _, kinds[name] = line.removeprefix("# TYPE ").partition(" ")
            assert name == seen[-1]
            assert kinds[name] in ("gauge", "counter")
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            name = match[1]
            assert name == seen[-1], "samples stand together, below their head"
            assert name.endswith("_total") is (kinds[name] == "counter")
            labels = re.findall(_LABEL, match[2] or "")
            plain = frozenset((key, re.sub(r"\\.", lambda found: _ESCAPES[found[0]], value)) for key, value in labels)
            assert len(dict(plain)) == len(labels)
            assert (name, plain) not in samples
            samples[name, plain] = float(match[5])
    assert set(kinds) == set(seen)
    return samples


def value(text: str, name: str, **labels: str) -> float:
    return read(text)[name, frozenset(labels.items())]


def test_a_page_says_what_the_snapshot_says() -> None:
    text = page(SNAPSHOT)
    assert value(text, "spes_build_info", version="0.1.0") == 1
    assert value(text, "spes_run_info", run_id="ab" * 32, run="a run", peer="12D3KooWx", role="bootstrap") == 1
    assert value(text, "spes_round") == 7
    assert "spes_tokens 9007199254740993\n" in text  # whole numbers are told whole
    assert value(text, "spes_members", role="standby") == 1
    assert value(text, "spes_links", path="relayed") == 2
    assert value(text, "spes_payload_bytes_total", direction="down") == 20
    assert value(text, "spes_rounds_total", strength="majority") == 1
    assert value(text, "spes_clock_offset_seconds") == -0.01
    assert value(text, "spes_selfcheck_ok", check="relay") == 0
    assert value(text, "spes_selfcheck_ok", check="clock") == 1
    assert value(text, "process_start_time_seconds") == 1700000000.25
    assert [value(text, f"spes_{name}") for name in ("ready", "halted", "stalled", "ended")] == [1, 0, 0, 0]
    assert value(page(replace(SNAPSHOT, halted=True)), "spes_halted") == 1
    assert {name for name, _ in read(text)} == {family.name for family in families(SNAPSHOT)}


def test_what_is_not_known_is_left_out() -> None:
    unknown = replace(
        SNAPSHOT, links=None, dht_records=None, disk={}, disk_free=None, clock_offset_seconds=None, checks={},
        checked=None, resident_bytes=None, open_files=None,
    )  # fmt: skip
    missing = {name for name, _ in read(page(SNAPSHOT))} - {name for name, _ in read(page(unknown))}
    assert missing == {
        "spes_links", "spes_dht_records", "spes_disk_used_bytes", "spes_disk_free_bytes", "spes_clock_offset_seconds",
        "spes_selfcheck_ok", "spes_selfcheck_timestamp_seconds", "process_resident_memory_bytes", "process_open_fds",
    }  # fmt: skip


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a\nb", "\\n", 'x{y="z"} 1', "é\u2028", ""])
def test_labels_arrive_as_they_are(name: str) -> None:
    labels = {"run_id": SNAPSHOT.run_id, "run": name, "peer": SNAPSHOT.peer_id, "role": SNAPSHOT.role}
    text = page(replace(SNAPSHOT, run_name=name))
    assert value(text, "spes_run_info", **labels) == 1
    assert len(read(text)) == len(read(page(SNAPSHOT)))


def test_a_label_that_is_no_text_does_not_spoil_the_page() -> None:
    assert "\ud800" not in page(replace(SNAPSHOT, run_name="a\ud800")).encode().decode()


@pytest.mark.parametrize(("number", "written"), [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")])
def test_numbers_that_are_none(number: float, written: str) -> None:
    assert f"spes_clock_offset_seconds {written}\n" in page(replace(SNAPSHOT, clock_offset_seconds=number))


# ---- where it is served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_an_address_to_serve_on(text: str, expected: tuple[str, int]) -> None:
    assert listen_address(text) == expected


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("example.org:9464", "example.org"),
        ("::1:9464", "::1"),
        ("[10.0.0.1]:9464", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:", "''"),
        ("65536", "65536"),
        ("-1", "-1"),
        ("٣", "٣"),
    ],
)
def test_an_address_that_is_none(text: str, wrong: str) -> None:
    with pytest.raises(UserError, match=r"^--metrics") as caught:
        listen_address(text)
    assert wrong in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("program", [join.main, bootstrap.main])
def test_an_address_that_is_none_ends_a_program_before_it_begins(
    program: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["--metrics", "nowhere:9464", "--dir", str(tmp_path / "home")]) == 2
    assert "--metrics 'nowhere:9464'" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


# ---- the server ------------------------------------------------------------------------------------------------------


def served(test: Callable[[Exporter, int], Awaitable[None]], make: Callable[[], Awaitable[str]] | None = None) -> None:
    """Run a coroutine with a server that is up, and its port."""

    async def plain() -> str:
        return page(SNAPSHOT)

    async def whole() -> None:
        server = Exporter(make or plain, clock=lambda: 0.0)
        await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(60):
                await test(server, int(server.url.rpartition(":")[2].partition("/")[0]))
        finally:
            await server.close()

    asyncio.run(whole())


async def ask(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer, after the server has closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *rest = head.decode().split("\r\n")
    return int(first.split(" ")[1]), dict(line.lower().split(": ", 1) for line in rest), body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_only_two_pages_are_there() -> None:
    async def test(server: Exporter, port: int) -> None:
        assert server.url == f"http://127.0.0.1:{port}/metrics"
        for path in ("/metrics", "/metrics?x=1"):
            code, headers, body = await ask(port, get(path))
            assert code == 200
            assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert int(headers["content-length"]) == len(body)
            assert headers["connection"] == "close"
            assert body.decode() == page(SNAPSHOT)
        code, _, body = await ask(port, get("/"))
        assert code == 200
        assert b"/metrics" in body
        for path in ("/status", "/metrics/", "//metrics", "/../metrics", "http://localhost/metrics"):
            assert (await ask(port, get(path)))[0] == 404, path
        for method in ("HEAD", "POST", "DELETE", "get"):
            code, headers, _ = await ask(port, get("/metrics", method))
            assert (code, headers["allow"]) == (405, "get"), method

    served(test)


def test_what_is_no_request_is_refused() -> None:
    async def test(server: Exporter, port: int) -> None:
        for request in (b"hello\r\n\r\n", b"\r\n\r\n", b"GET /metrics\r\n\r\n", b"\x16\x03\x01 \xff / x\r\n\r\n"):
            assert (await ask(port, request))[0] == 400, request
        long = b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * (REQUEST_BYTES_MAX // 6) + b"\r\n"
        assert (await ask(port, long))[0] == 431
        assert (await ask(port, get("/metrics")))[0] == 200

    served(test)


def test_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Exporter, port: int) -> None:
        monkeypatch.setattr(exporter, "REQUEST_SECONDS", 3600.0)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        idle[0][1].write(b"GET /met")
        await once(lambda: len(server._tasks) == CONNECTIONS_MAX)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # one more is cut at once
            await reader.readexactly(1)
        writer.close()
        for _, writer in idle:
            writer.close()
        await once(lambda: not server._tasks)
        monkeypatch.setattr(exporter, "REQUEST_SECONDS", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n")  # and nothing more: the server ends it
        assert await _rest(reader) == b""
        writer.close()
        monkeypatch.setattr(exporter, "REQUEST_SECONDS", 3600.0)
        assert (await ask(port, get("/metrics")))[0] == 200

    served(test)


async def once(holds: Callable[[], bool]) -> None:
    """Let the other tasks work until that is so; the test's deadline is over it."""
    while True:
        if holds():
            return
        await asyncio.sleep(0)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_a_crowd_shares_one_page() -> None:
    made = 0

    async def make() -> str:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return page(SNAPSHOT)

    async def test(server: Exporter, port: int) -> None:
        answers = await asyncio.gather(*(ask(port, get("/metrics")) for _ in range(CONNECTIONS_MAX)))
        assert {code for code, _, _ in answers} == {200}
        assert made == 1

    served(test, make)


def test_a_page_that_cannot_be_made_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> str:
        raise ValueError("no figures")

    async def test(server: Exporter, port: int) -> None:
        code, _, body = await ask(port, get("/metrics"))
        assert code == 500
        assert b"no figures" not in body

    served(test, make)
    assert "no figures" in caplog.text


def test_a_taken_port_is_told_in_a_line() -> None:
    async def start(port: int) -> None:
        async def make() -> str:
            return ""

        await Exporter(make).start("127.0.0.1", port)

    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(UserError, match="choose another --metrics"):
        asyncio.run(start(taken.getsockname()[1]))


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_commits_are_counted_by_their_strength(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    try:
        log.start([log.claim(ADA), log.claim(BOB)])
        log.close_round([log.header(ADA), log.header(BOB)])
        peer: Any = SimpleNamespace(chain=log.chain, ready=False)
        now = 100.0
        gatherer = Gatherer(peer, clock=lambda: now)
        log.close_round([log.header(ADA), log.header(BOB)])
        gatherer.follow()  # while it catches up, commits are not counted
        peer.ready = True
        gatherer.follow()
        assert gatherer._rounds == {}
        now = 130.0
        log.close_round([log.header(ADA), log.header(BOB)])
        log.close_with(ADA)
        gatherer.follow()
        gatherer.follow()
        assert gatherer._rounds == {"final": 1, "any": 1}
        assert gatherer._commit_at == 130.0
        assert set(exporter.STRENGTHS) == set(Strength) - {Strength.NONE}
    finally:
        log.close()


def test_disk_is_counted_by_what_it_holds(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "ab"
    (run / "blobs").mkdir(parents=True)
    (run / "snapshots" / "deep").mkdir(parents=True)
    for path in ("identity", "runs/ab/ledger.sqlite-wal", "runs/ab/blobs/a", "runs/ab/blobs/b", "runs/ab/log"):
        (tmp_path / path).write_bytes(bytes(5000))
    with (run / "snapshots" / "deep" / "sparse").open("wb") as file:
        file.truncate(1 << 30)  # takes no room
    (run / "blobs" / "elsewhere").symlink_to(tmp_path)  # nothing twice
    found = disk_used(tmp_path, run)
    assert set(found) == {"other", "ledger", "blobs", "snapshots"}
    assert found["blobs"] == found["other"] + (run / "blobs" / "elsewhere").lstat().st_blocks * 512
    assert found["ledger"] * 2 == found["other"] >= 10000
    assert found["snapshots"] < 1 << 20


def test_more_files_than_are_counted_give_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "ENTRIES_MAX", 2)
    for name in "abc":
        (tmp_path / name).touch()
    assert disk_used(tmp_path, tmp_path / "runs") == {}


def test_the_process_began_before_now() -> None:
    assert 0 < time.time() - exporter.started() < time.clock_gettime(time.CLOCK_BOOTTIME)


# ---- the self-check's verdicts ---------------------------------------------------------------------------------------


def test_the_clock_is_judged_by_the_median() -> None:
    assert selfcheck.judge_clock([]).ok is None
    right = selfcheck.judge_clock([0.1, -0.2, 0.0, 4e9])
    assert right.ok
    behind = selfcheck.judge_clock([60.0])
    assert behind.ok is False
    assert "60.0 s behind the others' (1 peer asked)" in behind.words
    assert "ahead of" in selfcheck.judge_clock([-5.0, -6.0, 0.0]).words


def test_clocks_are_asked_for_and_nonsense_is_left_out() -> None:
    replies = {"good": struct.pack(">d", 0.0), "long": bytes(9), "nan": struct.pack(">d", math.nan)}

    class Transport:
        async def call(self, peer: str, method: str, payload: bytes, *, timeout_seconds: float) -> bytes:
            assert (method, payload) == ("time", b"")
            if peer == "gone":
                raise NetworkError("gone")
            if peer == "old":
                raise RemoteError("method", "what is that")
            return replies[peer]

    transport: Any = Transport()
    offsets = asyncio.run(selfcheck.clock_offsets(transport, ["good", "long", "nan", "gone", "old"]))
    assert len(offsets) == 1
    assert offsets[0] < -1e9  # its clock is at the beginning of 1970
    many = [f"p{number}" for number in range(100)]
    replies.update(dict.fromkeys(many, struct.pack(">d", 1.0)))
    assert len(asyncio.run(selfcheck.clock_offsets(transport, many))) == selfcheck.PEERS_ASKED_MAX


PUBLIC, PRIVATE = "/ip4/8.8.8.8/tcp/4001", "/ip4/10.1.2.3/tcp/4001"
NAMED = "/dns4/boot.example.org/tcp/4001"


@pytest.mark.parametrize(
    ("announce", "told", "names", "words"),
    [
        ((), [PUBLIC, PRIVATE], {}, ""),
        ((), [PRIVATE], {}, "no address that others are told is public"),
        ((), [], {}, "none at all"),
        ((), ["/ip4/100.64.0.1/tcp/1", "/ip6/fe80::1%eth0/tcp/1", "/ip6/::1/tcp/1"], {}, "no address"),
        ((), ["/ip6/2a00:1450:4001:81b::200e/tcp/4001"], {}, ""),
        ((PUBLIC,), [PUBLIC], {}, ""),
        ((PUBLIC,), [PRIVATE], {}, f"{PUBLIC} is not told to others"),
        ((PRIVATE,), [PRIVATE], {}, f"{PRIVATE} is told to others, but it is not public"),
        ((NAMED,), [NAMED], {"boot.example.org": ("8.8.8.8",)}, ""),
        ((NAMED,), [NAMED], {"boot.example.org": ("192.168.0.2", "8.8.8.8")}, "not public"),
        ((NAMED,), [NAMED], {"boot.example.org": ()}, "its name is not found"),
    ],
)
def test_addresses_are_judged(
    announce: tuple[str, ...], told: list[str], names: dict[str, tuple[str, ...]], words: str
) -> None:
    finding = selfcheck.judge_addresses(announce, [f"{address}/p2p/12D3KooWx" for address in told], names)
    assert finding.ok is (not words)
    assert words in finding.words


def test_names_are_looked_up() -> None:
    found = asyncio.run(selfcheck.names_of(["/dns4/localhost/tcp/1/p2p/x", "/dns/a..b/tcp/1/p2p/x", PUBLIC]))
    assert "127.0.0.1" in found["localhost"]
    assert found["a..b"] == ()
    assert set(found) == {"localhost", "a..b"}


@pytest.mark.parametrize(
    ("greeting", "is_well"),
    [(b"\x13/multistream/1.0.0\n", True), (b"SSH-2.0-OpenSSH_9.2 and more\n", False), (b"", False)],
)
def test_a_port_is_right_if_libp2p_answers(greeting: bytes, is_well: bool) -> None:
    async def whole() -> selfcheck.Finding:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(greeting)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await selfcheck.check_ports([f"/ip4/0.0.0.0/tcp/{port}", "/ip4/0.0.0.0/tcp/0"])

    finding = asyncio.run(whole())
    assert finding.ok is is_well
    assert ("nobody answers" in finding.words) is not is_well


def test_a_port_that_nobody_listens_on() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        asked = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"
        finding = asyncio.run(selfcheck.check_ports([asked]))
    assert finding.ok is False
    assert asked in finding.words
    assert asyncio.run(selfcheck.check_ports(["/ip4/127.0.0.1/tcp/0"])).ok is None
