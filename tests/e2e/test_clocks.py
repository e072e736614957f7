"""Volunteers whose clocks are a minute off, both ways, train with one another through a door whose clock is right."""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.core.forks import strength_of
from spes_p2p.core.members import Strength
from tests.e2e.swarm import PATIENCE_SECONDS, Swarm, Volunteer, door, make_run, same_ledger
from tests.e2e.test_swarm import until_contribution

OFF_SECONDS = 60

_SHIFT = """
import time
true, true_ns = time.time, time.time_ns
time.time = lambda: true() + {seconds}
time.time_ns = lambda: true_ns() + {seconds} * 10**9
"""


def off(swarm: Swarm, seconds: int, *peers: str, options: Sequence[object] = ()) -> Volunteer:
    """A volunteer for all whose Python processes the time is so many seconds later."""
    folder = swarm.temporary / f"shift{seconds}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SHIFT.format(seconds=seconds))  # Python imports it before anything else
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return swarm.volunteer(f"off{seconds}", *peers, options=options, prefix=("env", f"PYTHONPATH={path}"))


def test_clocks_a_minute_off(tmp_path: Path) -> None:
    with Swarm(make_run(tmp_path, groups=2, min_peers=2, steps=2, grace_seconds=10.0)) as swarm:
        boot = swarm.bootstrap()
        slow = off(swarm, -OFF_SECONDS, door(boot))
        fast = off(swarm, OFF_SECONDS, door(boot), options=("--metrics", "localhost:0"))
        # Measured to half the time that a call may take.
        slow.wait_line(r"clock is (5[5-9]|6[0-5]) s behind the other peers'")
        fast.wait_line(r"clock is (5[5-9]|6[0-5]) s ahead of the other peers'")
        for volunteer in (slow, fast):
            until_contribution(volunteer, 1)  # later than the first round, which both may have waited for
        url = fast.wait_line(r"metrics at (http://127\.0\.0\.1:\d+/metrics)$")[1]
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            page = answer.read().decode()
        assert 'role="volunteer"' in page
        assert "\nspes_ready 1" in page
        assert {strength_of(step) for step in same_ledger(slow, fast) if step.commit} == {Strength.FINAL}
        assert not re.search(r"clock is \d+ s", boot.text)  # its self-check may find one of them there alone
