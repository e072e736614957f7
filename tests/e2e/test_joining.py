"""A newcomer that is killed in the middle of a snapshot goes on from what it had noted as being on its disk.

holder --> Sluice (lets so many bytes through, then holds the rest back) --> newcomer
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from spes_p2p.store.events import read_events
from spes_p2p.store.receiver import SYNC_BYTES
from spes_protocols.manifest import Codecs, Phase
from tests.e2e.swarm import (
    MODEL,
    PATIENCE_SECONDS,
    Swarm,
    Volunteer,
    door,
    expecting_no_orphans,
    make_run,
    same_ledger,
    states_fit,
)

LARGE = replace(MODEL, hidden_size=512, intermediate_size=512, num_experts=16)
"""Its state takes over 100 MB: a newcomer notes what it has after every 64 MiB."""

ROUNDS_BEFORE = 2
"""The blobs of so many rounds are more than the state."""

PHASES = (
    Phase(from_step=0, steps=1, batch_sequences=2),
    Phase(from_step=ROUNDS_BEFORE, steps=30, batch_sequences=2),  # long enough to be paused in the middle of it
)

PASSED_MAX = SYNC_BYTES + 24 * 1024 * 1024
"""Two requests of 4 MiB are under way at once: more than is needed for one note, and less than the state."""

LOOK_SECONDS = 0.05


class Sluice:
    """A TCP port that leads to another one. It lets `passed_max` bytes through to whoever connects, until opened.

    `held` is set when it holds the rest back and `holds` is true, which is looked at again and again.
    """

    def __init__(self, port: int, passed_max: int, holds: Callable[[], bool]) -> None:
        self.held = threading.Event()
        self.passed = 0
        self._opened = threading.Event()
        self._target = port
        self._passed_max = passed_max
        self._holds = holds
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Sluice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
        for each in (self._listener, *self._sockets):
            each.close()

    def open(self) -> None:
        """Let everything through."""
        self._opened.set()

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()
        except OSError:
            return  # closed

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(64 * 1024):
                while counted and self.passed >= self._passed_max and not self._opened.wait(LOOK_SECONDS):
                    if self._holds():
                        self.held.set()
                self.passed += len(data) if counted else 0
                target.sendall(data)
        except OSError:
            pass  # one side is gone
        finally:
            for each in (source, target):
                each.close()


def fetches(newcomer: Volunteer, name: str) -> list[dict[str, Any]]:
    """The events with this name in its log, those of its first life too, in order."""
    lives = read_events(newcomer.run_dir.events_path).lives
    return [line.fields for life in lives for line in life.lines if line.event == name]


def test_a_newcomer_killed_while_it_fetches_the_state_goes_on_where_it_was(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, groups=1, min_peers=1, phases=PHASES, model=LARGE, codecs=Codecs(shared="int4", group="fp32"),
        grace_seconds=20.0, blob_seconds=120.0,
    )  # fmt: skip
    with Swarm(run) as swarm:
        holder = swarm.volunteer("holder", door(swarm.bootstrap()))
        holder.until("in a long round", lambda s: s.round >= ROUNDS_BEFORE and s.phase == "training")
        swarm.spes("pause", "--dir", holder.home)
        head = holder.until("paused", lambda s: s.phase == "paused").round
        root = holder.steps()[-1].after.state_root
        home = run.folder / "newcomer"

        def has_noted() -> bool:
            return any(home.glob("runs/*/snapshots/*.arrived"))

        port = holder.address.split("/")[4]
        with Sluice(int(port), PASSED_MAX, has_noted) as sluice:
            address = holder.address.replace(f"/{port}/", f"/{sluice.port}/")
            newcomer = swarm.volunteer("newcomer", address)
            assert sluice.held.wait(PATIENCE_SECONDS), "nothing was noted of the snapshot"
            with expecting_no_orphans(newcomer):
                newcomer.signal(signal.SIGKILL)
                newcomer.wait_exit()
            states = newcomer.run_dir.states()
            lacking, whole = states.bytes_lacking(head, root), states.layout.file_bytes
            assert head not in states.rounds()
            assert 0 < lacking <= whole - SYNC_BYTES

            before = sluice.passed
            sluice.open()
            again = swarm.volunteer("newcomer", address)
            status = again.until_round(head)
            assert status.bytes_down < whole - SYNC_BYTES // 2, "the whole state would be more"
            assert sluice.passed - before < whole - SYNC_BYTES // 2
            first, *later = fetches(again, "snapshot_begun")  # twice, if nothing was silent for too long
            done = fetches(again, "snapshot_done")[-1]
            assert {event["state"] for event in (first, *later, done)} == {head}
            assert first["bytes"] > lacking >= later[0]["bytes"] >= later[-1]["bytes"] == done["bytes"]

            swarm.spes("resume", "--dir", holder.home)
            again.until_round(head + 1)
            assert same_ledger(holder, again)[-1].after.round > head
            assert states_fit(again) >= 1
            for program in swarm.programs:
                assert "internal error" not in program.text
                assert "Traceback" not in program.text
