"""`python -m tests.nat.mapping [--silent]`: a volunteer behind a symmetric router that opens ports when asked.

Two public peers dial back; the volunteer's own `Reach` judges, and a stranger connects to the address that comes of it.
Prints one JSON object. With --silent the router does not answer. Exit code 77 where there can be no namespaces.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.chaos import cage
from tests.nat import world

T = TypeVar("T")

EXIT_NO_NAMESPACES = 77
SECONDS_MAX = 300.0
HELPERS = 2


class Place:
    """An event loop in a thread on a host; what it starts is on that host too."""

    def __init__(self, host: world.Host) -> None:
        self.host = host
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        network = os.open(f"/run/netns/{self.host.name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(network, 0):
            raise OSError(ctypes.get_errno(), f"cannot move to {self.host.name}")
        self._loop.run_forever()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, SECONDS_MAX), self._loop).result()


def main(argv: Sequence[str]) -> int:
    """Build, judge, connect, print."""
    reason = world.obstacle() or cage.obstacle()
    if reason:
        print(f"no NAT laboratory here: {reason}", file=sys.stderr)
        return EXIT_NO_NAMESPACES
    with tempfile.TemporaryDirectory(prefix="spes-map-") as name:
        cage.enter()
        print(json.dumps(_try(Path(name), answers="--silent" not in argv)))
    return 0


def _try(folder: Path, *, answers: bool) -> dict[str, Any]:
    from tests.nat import mapping_nodes as nodes  # after the fork: they bring threads

    internet = world.Internet()
    helpers = [Place(internet.public(f"helper{number}")) for number in range(HELPERS)]
    stranger = Place(internet.public("stranger"))
    home = Place(internet.home("symmetric", "volunteer"))
    box = internet.boxes["volunteer"]
    gateway = gateway_on(box) if answers else None
    open_ones: list[tuple[Place, Any]] = []
    try:
        for place in helpers:
            open_ones += [(place, place.do(nodes.start(folder, place.host.name)))]
        known = [f"/ip4/{place.host.address}/tcp/4001/p2p/{helper.peer_id}" for place, helper in open_ones]
        volunteer = home.do(nodes.start(folder, "volunteer", known, port_map=True))
        open_ones.append((home, volunteer))
        for peer in known:
            home.do(volunteer.connect(peer))
        found = home.do(nodes.decide(volunteer, folder, gets_in=answers)) | {"box": box.address}
        if found["address"]:
            caller = stranger.do(nodes.start(folder, "stranger"))
            open_ones.append((stranger, caller))
            found["path"] = stranger.do(nodes.connect(caller, found["address"], volunteer.peer_id))
        return found
    finally:
        for place, transport in open_ones:
            place.do(transport.close())
        if gateway is not None:
            gateway.kill()
            gateway.wait()


def gateway_on(box: world.Host) -> subprocess.Popen[str]:
    """A router that opens ports when asked, beside what else it is."""
    command = [*box.prefix, sys.executable, "-m", "tests.nat.gateway", "192.168.1.1", box.address]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    assert "listens" in gateway.stdout.readline()
    return gateway


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
