"""The table of deadlines: in order, each before those it lies within, used, and as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path

from spes_p2p.net import timeouts
from spes_p2p.net.timeouts import TABLE

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_within_another_ends_first() -> None:
    seconds = {each.name: each.seconds for each in TABLE}
    assert len(seconds) == len(TABLE)
    wrong = [f"{each.name} in {outer}" for each in TABLE for outer in each.within if each.seconds >= seconds[outer]]
    assert wrong == []
    assert [each.seconds for each in TABLE] == sorted(seconds.values())


def test_every_deadline_is_taken_by_a_module() -> None:
    names = {name for name, value in vars(timeouts).items() if name.isupper() and isinstance(value, float)}
    assert len(names) == len(TABLE)
    folders = (ROOT / "spes_p2p" / "net", ROOT / "spes_p2p" / "peer")
    text = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.py"))
    assert names - set(re.findall(r"\btimeouts\.([A-Z_]+)\b", text)) == set()


def test_the_page_of_the_network_has_the_table() -> None:
    assert timeouts.markdown() in (ROOT / "docs" / "network.md").read_text(encoding="utf-8")
