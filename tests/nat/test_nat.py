"""Three pairs of home routers, with real ones of network namespaces; `make nat` goes through all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import cage
from tests.nat import world

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
