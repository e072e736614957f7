"""A router that opens a port when asked (NAT-PMP), of network namespaces, and the volunteer behind it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.chaos import cage
from tests.nat import world

pytestmark = pytest.mark.nat

WHY_NOT = world.obstacle() or cage.obstacle()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_volunteer_behind_a_symmetric_router_that_opens_a_port_is_reached_directly() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.nat.mapping"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "port-mapped", found
    assert found["address"].startswith(f"/ip4/{found['box']}/tcp/"), found
    assert found["path"] == "direct", found
