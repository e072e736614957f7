"""How long a round has been waiting for its end, and for whom (SPEC 5.12).

A machine that slept has not waited: of a long gap between two looks at the clock only a part counts.
"""

from __future__ import annotations

from spes_p2p.core.views import Leniency
from spes_protocols.manifest import Rounds

HEARD_REPEATS = 5
"""Who has not been heard for so many times `vote_seconds` counts as gone."""


class Patience:
    """The waiting of one peer in one round. It begins with the first message of the round that is heard or said."""

    def __init__(self, rules: Rounds, me: str) -> None:
        self._rules = rules
        self._me = me
        self._looked_at: float | None = None
        self._heard_at: dict[str, float] = {}
        self.waited_seconds = 0.0

    def hear(self, peer: str | None, now: float) -> None:
        """A message of this round; of `peer` itself, unless others pass it on."""
        if self._looked_at is None:
            self._looked_at = now
        if peer is not None:
            self._heard_at[peer] = now

    def is_there(self, peer: str, now: float) -> bool:
        """Whether a peer has been heard lately; this one always has."""
        since = now - HEARD_REPEATS * self._rules.vote_seconds
        return peer == self._me or self._heard_at.get(peer, since) > since

    def look(self, now: float) -> Leniency:
        """Let time pass; what the peer consents to after it."""
        rules = self._rules
        if self._looked_at is not None:
            self.waited_seconds += min(max(0.0, now - self._looked_at), rules.stall_seconds / 4)
            self._looked_at = now
        if self.waited_seconds >= rules.lease_seconds and self._most == Leniency.ANY:
            return Leniency.ANY
        return Leniency.MAJORITY if self.waited_seconds >= rules.stall_seconds else Leniency.QUORUM

    @property
    def is_half_over(self) -> bool:
        """Time for those who still train to come to an end."""
        return self.waited_seconds >= self._rules.stall_seconds / 2

    @property
    def _most(self) -> Leniency:
        return Leniency.ANY if self._rules.on_majority_loss == "continue" else Leniency.MAJORITY

    def next_look(self, leniency: Leniency) -> float | None:
        """When to look again, None when there is nothing more to consent to."""
        rules = self._rules
        if self._looked_at is None or leniency >= self._most:
            return None
        steps = (rules.stall_seconds / 2, rules.stall_seconds, rules.lease_seconds)
        left = min((step - self.waited_seconds for step in steps if step > self.waited_seconds), default=0.0)
        return self._looked_at + max(0.001, min(left, rules.stall_seconds / 8))
