"""A peer that breaks every rule it can while it holds its key: what less than a third of the votes may do.

It tells different peers different things, votes for sets nobody has seen, hides blobs, repeats what others said rounds
ago, floods the pool with claims of invented identities, refuses good contributions and answers with altered ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spes_p2p.core import rounds
from spes_p2p.core.ladder import Verdict
from spes_protocols.codec import sha256
from spes_protocols.messages import Header, Precommit, Prevote, Proposal, ProposedSet, Refusal, Signed
from tests.sim.peers import CHAIN_PART, SimPeer
from tests.sim.records import make_claim, make_header, open_set, peer_name, seal
from tests.sim.world import Blobs

HEARD_MAX = 60


class Liar(SimPeer):
    """Lies at random, as long as less than a third of the votes are faulty; else it stays silent."""

    honest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heard: list[Signed[Any]] = []
        self._has_plan = self.world.random.random() < 0.5

    def boot(self) -> None:
        """Start like anyone, and begin to make noise."""
        super().boot()
        self.after(1.0, self._make_noise)

    def on_network(self, sender: str, kind: str, content: Any) -> None:
        """Listen, remember what may be repeated, and answer questions about the ledger with lies."""
        if kind == "record" and len(self._heard) < HEARD_MAX and self.world.random.random() < 0.1:
            self._heard.append(content)
        if kind == "ask" and self.world.random.random() < 0.5:
            part = [self._altered(entry) for entry in self.disk.chain[content : content + CHAIN_PART]]
            self.send(sender, "entries", (content, tuple(part)))
            return
        super().on_network(sender, kind, content)

    def say(self, record: Proposal | Prevote | Precommit) -> Sequence[rounds.Output]:
        """Say it, keep it to itself, or say different things to different peers."""
        chance = self.world.random.random()
        if not self.world.is_in_model(self.head) or chance < (0.9 if self._splits(record) is False else 0.3):
            return super().say(record)
        if chance < 0.4 and self._splits(record) is None:
            self.log(f"keeps its {record.KIND} {record.view} to itself")
            return ()
        other = seal(self._other(record), self.name)
        own = seal(record, self.name)
        victims = [name for name in self.world.peers if self.world.random.random() < 0.5]
        if self._splits(record):
            victims = [self.world.random.choice(list(self.world.peers))] if isinstance(record, Precommit) else []
        self.log(f"says two {record.KIND}s {record.view}, one to {' '.join(map(self.world.label, victims))} alone")
        for target in self.world.peers:
            self.send(target, "record", own if target in victims else other)
        value = self.world.opened(own) if isinstance(record, Proposal) else None
        return self.participant.on_said(own, self.world.now, value and value.value)

    def _splits(self, record: Proposal | Prevote | Precommit) -> bool | None:
        """Half of the liars have a plan, None for the others.

        It is to help everybody towards a lock, to let a single peer believe that the round is closed, and to win the
        others for another set.
        """
        if not self._has_plan:
            return None
        if isinstance(record, Precommit):
            return bool(record.value)
        return isinstance(record, Proposal) and record.view > 0

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        """Good, bad, too loud, or shown to a few only."""
        header, blobs = super().make_contribution()
        chance = self.world.random.random()
        if chance < 0.4 or not self.world.is_in_model(self.head):
            return header, blobs
        if chance < 0.55:
            return header, Blobs(Verdict("finite"), self.name)
        if chance < 0.7:
            norms = tuple((name, 1e9) for name, _ in blobs.verdict.norms)
            return header, Blobs(Verdict(None, norms), self.name)
        if chance < 0.8:
            wrong = {"base": sha256(b"elsewhere")} if chance < 0.75 else {"tokens": 2**30}
            return make_header(self.world.manifest, self.head, self.name, **wrong), blobs
        peers = sorted(self.world.peers)
        shown_to = frozenset(self.world.random.sample(peers, self.world.random.randrange(len(peers))))
        return header, Blobs(blobs.verdict, self.name, shown_to)

    def _other(self, record: Proposal | Prevote | Precommit) -> Proposal | Prevote | Precommit:
        """Something else that could stand in the same place."""
        chance = self.world.random.random()
        if isinstance(record, Proposal):
            return replace(record, value=self._other_set(record.value), valid_view=-1, polc=())
        if isinstance(record, Prevote):
            return replace(record, value=b"" if record.value and chance < 0.5 else sha256(b"unknown"))
        if chance < 0.5 and record.value:
            return replace(record, value=b"", state_root=b"")
        return replace(record, value=record.value or sha256(b"unknown"), state_root=sha256(b"root"))

    def _other_set(self, value: ProposedSet) -> ProposedSet:
        """A set with a good contribution left out or refused, or with claims left out."""
        chance = self.world.random.random()
        if not value.headers or (chance < 0.3 and (value.claims or value.releases)):
            return replace(value, claims=(), releases=())
        number = self.world.random.randrange(len(value.headers))
        headers = value.headers[:number] + value.headers[number + 1 :]
        if chance < 0.5:
            return replace(value, headers=headers)
        check = self.world.random.choice(("finite", "norm", "sections", "base"))
        opened = open_set(value)
        pairs = [*opened.refused, (check, opened.headers[number])]
        pairs.sort(key=lambda pair: pair[1].signer)
        refusals = tuple(Refusal(check=check, header=header.raw) for check, header in pairs)
        return replace(value, headers=headers, refusals=refusals)

    def _altered(self, entry: Any) -> Any:
        if entry.commit is None or self.world.random.random() < 0.5:
            return entry
        if self.world.random.random() < 0.5:
            return replace(entry, votes=entry.votes[:1])
        body = replace(entry.commit.body, state_root=sha256(b"other"))
        return replace(entry, commit=replace(entry.commit, body=body))

    # ---- noise -------------------------------------------------------------------------------------------------

    def _make_noise(self) -> None:
        """Now and then: old messages, invented peers, votes far ahead."""
        self.after(self.world.random.uniform(1.0, 4.0), self._make_noise)
        if not self.world.is_in_model(self.head) or not self.head.members or self.head.ended:
            return
        work = self.world.random.choice((self._repeat, self._invent_peers, self._vote_ahead))
        work()

    def _repeat(self) -> None:
        for signed in self._heard[-5:]:
            self._tell_all(signed)
        self._heard = self._heard[: HEARD_MAX // 2]

    def _invent_peers(self) -> None:
        for _ in range(3):
            name = peer_name(self.world.random.randrange(1000, 5000))
            self._tell_all(make_claim(self.head, name, self.world.random.randrange(2)))
        header: Signed[Header] = seal(make_header(self.world.manifest, self.head, self.name).record, peer_name(999))
        self._tell_all(header)

    def _vote_ahead(self) -> None:
        head = self.head
        record = Prevote(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round + self.world.random.randrange(2),
            view=self.world.random.randrange(1, 10**5),
            value=sha256(b"unknown"),
        )
        self._tell_all(seal(record, self.name))

    def _tell_all(self, signed: Signed[Any]) -> None:
        for target in self.world.peers:
            self.send(target, "record", signed)
