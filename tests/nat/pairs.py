"""Every kind of home with every other: two hosts of each kind, the first of which fetches from all the second ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from spes_p2p.net.launch import launch
from tests.nat.world import Host, Internet

RELAYS = 4
"""A peer behind a router learns its outer address from so many others before it believes it."""

BYTES = 2 * 1024 * 1024
STRAIGHTEN_TRIES = 2
START_SECONDS = 120.0
ANSWER_SECONDS = 120.0

Pair = tuple[str, str]


class Node:
    """A node's process on a host; calls are answered in order."""

    def __init__(self, host: Host, folder: Path, *flags: str) -> None:
        self.host = host
        command = [sys.executable, "-m", "tests.nat.node", "--home", str(folder / host.name), *flags]
        self._log = (folder / f"{host.name}.log").open("wb")
        self._process = subprocess.Popen(
            launch([_which("nsenter"), *host.prefix[1:], *command]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, bufsize=1,
        )  # fmt: skip
        self._lock = threading.Lock()

    def started(self) -> None:
        """Wait for its first words."""
        first = self._answer(START_SECONDS)
        self.peer, self.addresses = str(first["peer"]), list(first["addresses"])

    def ask(self, **order: Any) -> dict[str, Any]:
        """One order and its answer; an error of the network is in it as `error`."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        guard = threading.Timer(seconds, self._process.kill)
        guard.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        if not line:
            raise RuntimeError(f"{self.host.name} ended or said nothing for {seconds:.0f} s; see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Neighbourhood:
    """Relays, and two homes of each kind with a node in each."""

    def __init__(self, kinds: Sequence[str], folder: Path) -> None:
        internet = Internet()
        self._nodes: list[Node] = []
        hosts = [internet.public(f"relay{number}") for number in range(RELAYS)]
        relays = [self._start(host, folder, "--listen", "/ip4/0.0.0.0/tcp/443", "--serve-relay") for host in hosts]
        doors = []
        for relay in relays:
            relay.started()
            doors.append(next(address for address in relay.addresses if relay.host.address in address))
        through = [word for door in doors for word in ("--relay", door)]
        self.first: dict[str, Node] = {}
        self.second: dict[str, Node] = {}
        for kind in kinds:
            for number, side in enumerate((self.first, self.second)):
                host = internet.home(kind, f"{kind}-{number}")
                flags = () if kind == "public" else through
                side[kind] = self._start(host, folder, "--listen", "/ip4/0.0.0.0/tcp/4001", *flags)
        for node in (*self.first.values(), *self.second.values()):
            node.started()

    def _start(self, host: Host, folder: Path, *flags: str) -> Node:
        node = Node(host, folder, *flags)
        self._nodes.append(node)
        return node

    def __enter__(self) -> Neighbourhood:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self._nodes:
            node.close()

    def fetch(self, pair: Pair) -> dict[str, Any]:
        """The first host of one kind fetches from the second of another: over what came first, and again in the end.

        Before it each tries to reach the other, and between the two fetches each makes the connection a direct one.
        """
        asking, asked = self.first[pair[0]], self.second[pair[1]]
        for one, other in ((asking, asked), (asked, asking)):
            one.ask(do="know", peer=other.peer, addresses=other.addresses)
        tries = [asking.ask(do="reach", peer=asked.peer), asked.ask(do="reach", peer=asking.peer)]
        first = asking.ask(do="fetch", peer=asked.peer, bytes=BYTES)
        for one, other in ((asking, asked), (asked, asking)) * STRAIGHTEN_TRIES:
            if one.ask(do="straighten", peer=other.peer).get("path") == "direct":
                break
        result = asking.ask(do="fetch", peer=asked.peer, bytes=BYTES)
        intact = bool(first.get("intact") and result.get("intact"))
        return result | {
            "intact": intact,
            "first_path": first.get("path"),
            "reached": ["error" not in t for t in tries],
        }


def measure(pairs: Sequence[Pair], folder: Path) -> dict[Pair, dict[str, Any]]:
    """What came of each pair; those who share no host run side by side."""
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair))
    found: dict[Pair, dict[str, Any]] = {}
    with Neighbourhood(kinds, folder) as world, ThreadPoolExecutor(len(kinds)) as pool:
        for shift in range(len(kinds)):
            now = [
                (kind, kinds[(number + shift) % len(kinds)])
                for number, kind in enumerate(kinds)
                if (kind, kinds[(number + shift) % len(kinds)]) in pairs
            ]
            found |= dict(zip(now, pool.map(world.fetch, now), strict=True))
    return found


def _which(program: str) -> str:
    path = shutil.which(program)
    assert path is not None
    return path
