"""`spes doctor` for a volunteer behind a symmetric router, of network namespaces, with the bootstraps of a real run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spes_client import prober
from tests.chaos import cage
from tests.nat import world

pytestmark = pytest.mark.nat

WHY_NOT = world.obstacle() or cage.obstacle()
if not WHY_NOT and prober.python() is None:
    WHY_NOT = f"py-libp2p is not at {prober.directory()}; install it: spes doctor --install-prober"


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_symmetric_router_is_told_as_that() -> None:
    flags = ("--json", "--disk", "1", "--cache", "1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.nat.doctor", "symmetric", *flags], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain = json.loads(done.stdout)
    assert plain["network"]["reached"] == "symmetric"
    rows = {row["what"]: row for row in plain["rows"]}
    assert rows["own address"]["found"].startswith("behind a router: 192.168.1.2 here, 11.0.113."), rows
    assert rows["router"]["found"].startswith("symmetric"), rows
    assert rows["from outside"]["command"].startswith("spes-join "), rows
    assert "finds the same" in rows["second opinion"]["found"], rows
