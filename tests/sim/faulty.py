"""Machines that do not keep to the rules without meaning to: bad arithmetic, lost memory, a backup put back.

They count as faulty: what is promised holds while less than a third of the votes are theirs and the liars'.
"""

from __future__ import annotations

from typing import Any

from spes_protocols.messages import VerifiedSet
from tests.sim.disk import Disk
from tests.sim.peers import SimPeer
from tests.sim.records import next_root


class SlipPeer(SimPeer):
    """Computes a wrong state root the first time in every round, the right one when asked again."""

    honest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computed: set[bytes] = set()

    def compute_root(self, value: VerifiedSet) -> bytes:
        """Wrong once for each set."""
        right = super().compute_root(value)
        if value.id in self._computed:
            return right
        self._computed.add(value.id)
        return right[::-1]


class BrokenPeer(SimPeer):
    """Computes state roots of its own, always: memory or arithmetic of this machine are at fault."""

    honest = False
    applies_rightly = False

    def compute_root(self, value: VerifiedSet) -> bytes:
        """Never the right one."""
        return next_root(self.name.encode(), value.id)


class AmnesiacPeer(SimPeer):
    """Loses its whole disk in every crash, and with it what it has said."""

    honest = False

    def go_down(self) -> None:
        """The disk goes with the machine."""
        super().go_down()
        self.disk = Disk(self.world.genesis)


class BackupPeer(SimPeer):
    """Its person makes a copy of the directory now and then, and sometimes goes on from one that is old."""

    honest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backup = self.disk.image()
        self.world.after(self._chance.uniform(1.0, 5.0), self._go_on)

    @property
    def _chance(self) -> Any:
        return self.world.chance(f"backup {self.name}")

    def _go_on(self) -> None:
        self.world.after(self._chance.uniform(1.0, 5.0), self._go_on)
        if not self.world.faults_on or not self.up or self.wakes_at > self.world.now:
            return
        if self._chance.random() < 0.5:
            self._backup = self.disk.image()
        else:
            self.go_down()
            self.log(f"has its backup of round {self._backup.head.round} put back")
            self.disk = self._backup.image()
