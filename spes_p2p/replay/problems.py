"""What is wrong with a log, in the words that `spes-replay verify` reports it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One failed check. `round` is None for what belongs to no round; `peer` whose record or blob it is, if known."""

    round: int | None
    file: Path
    check: str
    detail: str
    peer: str = ""

    def __str__(self) -> str:
        place = "outside the rounds" if self.round is None else f"round {self.round}"
        whose = f" (of {self.peer})" if self.peer else ""
        return f"{place}: {self.file}: {self.check} failed: {self.detail}{whose}"
