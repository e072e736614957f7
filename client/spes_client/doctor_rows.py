"""One row of `spes doctor`: what was looked at, how it is, what was found; of what is not well, why and what next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from spes_client import homes, ui
from spes_client.doctor_findings import GIVEN, Findings

State = Literal["ok", "warning", "problem", "unknown"]

CHECKS = (
    "program", "run", "peer here", "home", "identity", "identity backup", "ledger", "network file", "open files",
    "disk", "memory and card", "listen", "network daemon", "own address", "from outside", "relay", "addresses", "given",
    "remembered", "more addresses", "second opinion", "dial back", "router", "clock", "peer", "more peers", "download",
    "upload",
)  # fmt: skip
"""What is checked: a row's `what` is one of these, or begins with one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """`cause` and `advice` are empty where `state` is "ok", and only there.

    `advice` is a command line to type, or ends with one after a colon and a blank. Capital letters in it stand for what
    only the person knows, such as ADDRESS.
    """

    what: str
    state: State
    found: str
    cause: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.state == "ok") == (not self.cause) == (not self.advice), self

    @property
    def check(self) -> str:
        """Which of `CHECKS` it is."""
        return max((name for name in CHECKS if f"{self.what} ".startswith(f"{name} ")), key=len)

    @property
    def command(self) -> str:
        """The command line of the advice; empty where all is well."""
        return self.advice.rpartition(": ")[2]


Maker = Callable[[str, str, str, str], Row]
"""(what, found, cause, advice) -> a row of one state."""


def good(what: str, found: str) -> Row:
    """Nothing is wrong with it."""
    return Row(what=what, state="ok", found=found)


def warn(what: str, found: str, cause: str, advice: str) -> Row:
    """It works, less well than it could, or not for all."""
    return Row(what=what, state="warning", found=found, cause=cause, advice=advice)


def bad(what: str, found: str, cause: str, advice: str) -> Row:
    """It does not work."""
    return Row(what=what, state="problem", found=found, cause=cause, advice=advice)


def unclear(what: str, found: str, cause: str, advice: str) -> Row:
    """It could not be found out."""
    return Row(what=what, state="unknown", found=found, cause=cause, advice=advice)


def here(found: Findings, program: str, *more: str) -> str:
    """A command line for this home; --dir is left out where it is the default."""
    if found.home_found.is_file:
        return " ".join([program, "--dir DIRECTORY", *more])
    if found.is_default_home:
        return " ".join([program, *more])
    return homes.command(program, found.home, *more)


def again(found: Findings, *more: str, without: tuple[str, ...] = ()) -> str:
    """The command line that runs this check again, with its flags but those in `without` or set anew by `more`.

    Of the addresses that were given one is named: any peer is enough.
    """
    known = [] if _has(more, "--peer") else [f"--peer {each}" for each in _a_peer(found)]
    return here(found, "spes doctor", *known, *_flags(found, more, without), *more)


def join(found: Findings, *more: str) -> str:
    """The command line that joins as the check was asked about; `ADDRESS` where no peer is known."""
    known = _a_peer(found)
    if not known and not any(address.run_id is not None for address in found.addresses):
        known = ["ADDRESS"]
    return here(found, homes.JOIN, *(f"--peer {each}" for each in known), *_flags(found, more, ()), *more)


def _a_peer(found: Findings) -> list[str]:
    """One address of those given, the best of them; none where the home remembers others, or all are nonsense."""
    given = [address for address in found.addresses if address.source == GIVEN and not address.problem]
    given.sort(key=lambda address: (address.run_id is None or address.run_id != found.run_id, address.is_own))
    return [shlex.quote(ui.one_line(given[0].text))] if given else []


def _flags(found: Findings, more: tuple[str, ...], without: tuple[str, ...]) -> Iterator[str]:
    for name, value in found.flags:
        if name not in without and not _has(more, name):
            yield name if value is None else f"{name} {shlex.quote(ui.one_line(value))}"


def _has(words: tuple[str, ...], name: str) -> bool:
    return any(word.partition(" ")[0] == name for word in words)


def short_address(address: str) -> str:
    """An address as it fits into a table: all of it but the middle of the peer id, and no run id."""
    text = ui.one_line(address.partition("#")[0]) or "''"
    head, mark, peer = text.rpartition("/p2p/")
    if mark and len(peer) > 8:
        text = f"{head}/{ui.short_peer(peer)}"
    return text if len(text) <= 48 else f"{text[:24]}…{text[-23:]}"
