"""Three pairs of home routers, with real ones of network namespaces, and what is told of a swarm behind all of them.

The swarm itself takes minutes; `make nat` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.store.events import Line
from tests.chaos import cage
from tests.nat import world
from tests.nat.__main__ import cell
from tests.nat.swarm import Came, Found, came, is_to_be_direct

pytestmark = pytest.mark.nat

WHY_NOT = world.obstacle() or cage.obstacle()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_peers_behind_routers_exchange_data_and_directly_where_that_can_be(tmp_path: Path) -> None:
    pairs = {
        "port-restricted:port-restricted": "direct",
        "symmetric:port-restricted": "relayed",
        "public:symmetric": "direct",
    }
    flags = [word for pair in pairs for word in ("--pair", pair)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.nat", "--json", "--dir", str(tmp_path), *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {pair: found[pair]["path"] for pair in pairs} == pairs


def test_a_contribution_counts_where_every_blob_came_from_its_author() -> None:
    def line(event: str, **fields: object) -> Line:
        return Line(at=0, mono=0.0, event=event, fields=fields)

    def blob(signer: str, *holders: str) -> Line:
        return line("blob_came", signer=signer, holders=list(holders))

    lines = [
        line("link", peer="a", path="relayed"),
        blob("a", "a"), blob("a", "a"), line("checked", signer="a"),
        line("link", peer="a", path="direct"),
        blob("a", "a"), blob("b", "b"), blob("a", "a", "b"), line("checked", signer="a"),
        line("checked", signer="b", check="norm"),
        blob("a", "a"), line("checked", signer="a"),
        blob("b", "b"), blob("b"), line("checked", signer="b"),
        line("checked", signer="b"),
    ]  # fmt: skip
    assert came(lines) == {"a": Came(direct=1, relayed=1)}


def test_what_is_wrong_in_a_swarm_is_told() -> None:
    assert is_to_be_direct("public", "symmetric") and is_to_be_direct("double", "port-restricted")
    assert not is_to_be_direct("symmetric", "double") and not is_to_be_direct("public", "closed")
    kinds = {"public-0": "public", "public-1": "public", "closed-0": "closed"}
    pairs = [(one, other) for one in kinds for other in kinds if one != other]
    fine = Found(
        kinds=kinds, paths={pair: "relayed" if "closed-0" in pair else "direct" for pair in pairs},
        came=dict.fromkeys(pairs, Came(direct=1)), verdicts={}, owners=3, counted=[2, 3], seconds={},
    )  # fmt: skip
    assert fine.problems() == []
    bad = replace(
        fine, paths=fine.paths | {pairs[0]: "relayed"}, came=fine.came | {pairs[1]: Came()}, counted=[2]
    )  # fmt: skip
    assert bad.problems() == [
        "public-0 has no direct connection to public-1",
        "no contribution of closed-0 came to public-0 from closed-0 itself",
        "no commit counts the contributions of all 3",
    ]
    assert [cell([what]) for what in bad.plain()["pairs"].values()][:2] == ["relayed", "NOTHING"]
    assert cell(list(bad.plain()["pairs"].values())[2:]) == "1 direct, 3 relayed"
