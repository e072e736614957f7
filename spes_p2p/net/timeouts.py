"""Every deadline of an operation between peers, in one table from the shortest to the longest.

What runs inside another operation, or has to be given up before another side gives up, ends before it: `within` names
those, and a test compares them. So an error says what failed, not only that all of it took too long. Modules take their
seconds from here. Of a transfer only silence has one here; the whole has what the run's manifest gives it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """So many seconds, why so many, and the operations that must not end before it has passed."""

    name: str
    seconds: float
    why: str
    within: tuple[str, ...] = ()


_table: list[Deadline] = []


def _deadline(name: str, seconds: float, why: str, *within: str) -> float:
    _table.append(Deadline(name=name, seconds=seconds, why=why, within=within))
    return seconds


LOOK = _deadline("look", 2.0, "a pace can be told by then; a faster holder is looked for", "blob idle")
PULSE = _deadline("pulse", 3.0, "the daemon answers in milliseconds; silent twice, it is started anew")
RELAY_ANSWER = _deadline(
    "relay answer",
    3.0,
    "a few round trips: a relay that is back greets, one that is used tells its rate",
    "leaves idle",
    "dial back",
    "blob idle",
)
DHT_REQUEST = _deadline(
    "DHT request", 3.0, "nodes that are gone must not use up a look-up", "DHT join", "DHT look-up", "DHT publish"
)
DAEMON_STOP = _deadline("daemon stop", 3.0, "it has nothing to save; then it is killed")
DIAL = _deadline(
    "dial",
    4.0,
    "connecting before a call, a lost packet or two; the call itself dials once more",
    "clock",
    "holdings",
    "hello",
    "ask",
    "push",
    "call",
    "leaves idle",
    "dial back",
    "blob idle",
)
CLOCK = _deadline("clock", 5.0, "a late answer says nothing of a clock")
HOLDINGS = _deadline("holdings", 5.0, "a small answer, and the next is asked for in 2 s", "request", "handler")
HELLO = _deadline("hello", 8.0, "a greeting is small, and the next is due in 15 s", "request", "handler")
ASK = _deadline("ask", 8.0, "a commit of a few waits for the others' word", "request", "handler")
PUSH = _deadline("push", 10.0, "a proposal of a large run at the slowest line allowed", "request", "handler")
CONNECT = _deadline("connect", 10.0, "an address that was given: name, dial, handshake", "first connection")
LINGER = _deadline("linger", 10.0, "whoever asked closes once it has read the answer", "send")
DHT_JOIN = _deadline("DHT join", 10.0, "it is tried again by itself")
DHT_ATTACH = _deadline("DHT attach", 10.0, "after a restart of the daemon; it is tried again by itself")
DHT_LOOK_UP = _deadline("DHT look-up", 15.0, "several requests after one another")
DHT_PUBLISH = _deadline("DHT publish", 15.0, "a look-up of where to, then the writing")
LEAVES_IDLE = _deadline("leaves idle", 15.0, "64 KiB from a line with others on it", "leaf", "send")
CALL = _deadline("call", 20.0, "2 MiB of ledger at the slowest line allowed", "request", "ledger", "handler")
DIAL_BACK = _deadline("dial back", 20.0, "one asker is dialled at a time, for 3 s, of up to four", "request", "handler")
BLOB_IDLE = _deadline("blob idle", 20.0, "64 KiB from a line with others on it", "blob", "send")
FIRST_CONNECTION = _deadline("first connection", 20.0, "each address that was given is tried a few times")
DAEMON_START = _deadline("daemon start", 20.0, "a slow disk, a busy machine")
REQUEST = _deadline("request", 30.0, "reading what is asked: who asks has given up by then", "handler")
SEND = _deadline("send", 60.0, "a piece of an answer: who reads has given up by then", "handler")
BLOB = _deadline("blob", 60.0, "going forward, and what its size takes at 32 KiB/s")
LEDGER = _deadline("ledger", 60.0, "several calls; then another peer is read from")
LEAF = _deadline("leaf", 75.0, "4 MiB at the slowest line allowed, shared by two")
HANDLER = _deadline("handler", 120.0, "answering, or the next chunk: nobody waits for it any more")

TABLE: tuple[Deadline, ...] = tuple(_table)
"""From the shortest to the longest."""


def markdown() -> str:
    """The table as it stands on the page of the network."""
    rows = ["| operation | seconds | ends before | why so long |", "|---|---|---|---|"]
    rows += [f"| {each.name} | {each.seconds:g} | {', '.join(each.within)} | {each.why} |" for each in TABLE]
    return "\n".join(rows) + "\n"
