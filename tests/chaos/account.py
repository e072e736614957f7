"""What happened, in figures that outlive an interruption: `account.json` in the swarm's directory.

A commit counts from the moment somebody has printed it, which is after it lies on a disk, or was found on the disk of a
peer that had been killed. Whatever of these the final ledger lacks is lost.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

CALM, CHAOS, SETTLING = "calm", "chaos", "settling"


@dataclass(kw_only=True)
class Account:
    """Counts of a whole run. `seen`: "round/state" of each commit; `on_disk`: commit id to round."""

    peers: int
    seed: int
    caged: bool
    lag: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seen: dict[str, int] = field(default_factory=dict)
    on_disk: dict[str, int] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    stall_seconds: float = 0.0
    settle_seconds: float = 0.0
    lost: int = 0
    problems: list[str] = field(default_factory=list)
    _phase: str = ""
    _since: float = 0.0
    _last: float = 0.0

    # ---- taking down -------------------------------------------------------------------------------------------

    def begin(self, phase: str, now: float) -> None:
        """Another phase begins; an empty name ends the one before."""
        if self._phase:
            self._gap(now)
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if phase in (CALM, CHAOS):
            self._last = now

    def commit(self, number: int, state: str, tokens: int, now: float) -> bool:
        """A commit that somebody has printed; returns whether it is new."""
        key = f"{number}/{state}"
        if key in self.seen:
            return False
        self.seen[key] = tokens
        self._gap(now)
        self._last = now
        if self._phase:
            self.tokens[self._phase] += tokens
            self.rounds[self._phase] += 1
        return True

    def _gap(self, now: float) -> None:
        if self._phase in (CHAOS, SETTLING):
            self.stall_seconds = max(self.stall_seconds, now - self._last)

    def durable(self, number: int, commit_id: bytes) -> None:
        """A commit that lies on a disk."""
        self.on_disk[commit_id.hex()] = number

    def problem(self, text: str) -> None:
        """Something that must not be; what is said again and again counts once."""
        if text not in self.problems:
            self.problems.append(text)

    def settle_with(self, states: Collection[tuple[int, str]], ids: Collection[bytes]) -> list[str]:
        """Compare with the final ledger: (round, first twelve digits of the state after it), and commit ids.

        Returns the commits that are lost, in words, and counts them.
        """
        final, final_ids = {f"{number}/{state}" for number, state in states}, {each.hex() for each in ids}
        lost = {int(key.partition("/")[0]): f"printed with state {key}" for key in self.seen if key not in final}
        lost |= {number: f"on a disk as {each}" for each, number in self.on_disk.items() if each not in final_ids}
        self.lost = len(lost)
        return [f"the commit of round {number} is lost, {how}" for number, how in sorted(lost.items())]

    # ---- telling -----------------------------------------------------------------------------------------------

    @property
    def kill_count(self) -> int:
        """SIGKILLs, each to one process or to all of a peer."""
        return self.kills.total()

    def per_second(self, phase: str) -> float:
        """Tokens per second that commits counted in a phase."""
        return self.tokens[phase] / self.seconds[phase] if self.seconds[phase] else 0.0

    @property
    def speed(self) -> float:
        """Tokens per second under faults as a share of those without."""
        calm = self.per_second(CALM)
        return self.per_second(CHAOS) / calm if calm else 0.0

    def table(self) -> str:
        """Several lines for people."""
        rows = [
            ("peers", f"{self.peers} and 2 bootstraps, {'each in a network of its own' if self.caged else 'loopback'}"),
            ("kills", ", ".join(f"{count} {what}" for what, count in sorted(self.kills.items()))),
            ("other faults", ", ".join(f"{count} {what}" for what, count in sorted(self.faults.items()))),
            *((f"{phase}", self._phase_text(phase)) for phase in (CALM, CHAOS)),
            ("back together", f"{self.settle_seconds:.0f} s after the last fault"),
            ("problems", str(len(self.problems))),
        ]
        return "\n".join(f"  {name:<14} {value or 'none'}" for name, value in rows)

    def _phase_text(self, phase: str) -> str:
        rate = self.per_second(phase)
        return f"{self.rounds[phase]} rounds in {self.seconds[phase]:.0f} s, {rate:.0f} tokens per second"

    def last_line(self) -> str:
        """The result in one line."""
        return (
            f"chaos: {self.kill_count} kills, {self.rounds[CHAOS]} rounds, {self.lost} lost, "
            f"stall {self.stall_seconds:.0f} s, speed {100 * self.speed:.0f} %"
        )

    # ---- keeping -----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write to a file, whole or not at all."""
        fresh = path.with_suffix(".new")
        fields = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        fresh.write_text(json.dumps(fields, indent=1))
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path) -> Account:
        """Read what `save` wrote; problems of before stay problems."""
        fields = json.loads(path.read_text())
        for name in ("kills", "faults", "tokens", "rounds", "seconds"):
            fields[name] = Counter(fields[name])
        return cls(**fields)
