"""One row of `spes doctor`: what was looked at, how it is, what was found; of what is not well, why and what next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spes_client import homes, ui

if TYPE_CHECKING:
    from spes_client.doctor_findings import Findings

State = Literal["ok", "warning", "problem", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """`cause` and `advice`, which ends with what to type, are empty where `state` is "ok", and only there."""

    what: str
    state: State
    found: str
    cause: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.state == "ok") == (not self.cause) == (not self.advice), self


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
    if found.is_default_home:
        return " ".join([program, *more])
    return homes.command(program, found.home, *more)


def again(found: Findings, *more: str) -> str:
    """The command line that runs this check again."""
    return here(found, "spes doctor", *more)


def short_address(address: str) -> str:
    """An address as it fits into a table: all of it but the middle of the peer id, and no run id."""
    text = ui.one_line(address.partition("#")[0])
    head, mark, peer = text.rpartition("/p2p/")
    if mark and len(peer) > 8:
        text = f"{head}/{ui.short_peer(peer)}"
    return text if len(text) <= 48 else f"{text[:24]}…{text[-23:]}"
