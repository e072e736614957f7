"""A peer that breaks every rule it can while it holds its key: what less than a third of the votes may do.

    Options.lies --> which of its lies are on: votes, contributions, answers, noise

Above a third nothing is promised, so it stays silent there. Each lie is said in the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spes_p2p.core import rounds
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.ledger import advanced, commit_body
from spes_protocols.codec import sha256
from spes_protocols.messages import Commit, Header, Precommit, Prevote, Proposal, ProposedSet, Refusal, Reset, Signed
from tests.sim.catching_up import CHAIN_PART, Presence
from tests.sim.disk import Entry
from tests.sim.peers import SimPeer
from tests.sim.records import make_claim, make_header, make_set, next_root, open_set, peer_name, seal
from tests.sim.world import Blobs

HEARD_MAX = 60
FLOOD_CLAIMS = 40
NOISE_SECONDS = (1.0, 4.0)


class Liar(SimPeer):
    """Lies at random, as long as less than a third of the votes are faulty."""

    honest = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = self.world.chance(f"liar {self.name}")
        self._lies = frozenset(self.world.options.lies)
        self._heard: list[Signed[Any]] = []
        self._has_plan = "plan" in self._lies and (len(self._lies) == 1 or self._random.random() < 0.5)
        self._hides_after_vote = False

    def begin(self) -> None:
        """Start like anyone, and begin to make noise."""
        super().begin()
        self.after(1.0, self._make_noise)

    def _does(self, lie: str, share: float = 1.0) -> bool:
        return lie in self._lies and self._random.random() < share and self.world.is_in_model(self.head)

    # ---- votes and proposals -----------------------------------------------------------------------------------

    def say(
        self, record: Proposal | Prevote | Precommit, proof: tuple[Signed[Prevote], ...]
    ) -> Sequence[rounds.Output]:
        """Say it, keep it to itself, or say different things to different peers."""
        if isinstance(record, Precommit) and record.value and self._hides_after_vote:
            self._hide_blobs()
        if not isinstance(record, Proposal) and self._does("consent", 0.7):
            record = replace(record, degraded=True)
        planned = self._plans(record)
        if planned is None:
            if self._does("silence", 0.1):
                self.log(f"keeps its {record.KIND} {record.view} to itself")
                return ()
            if self._does("unknown_votes", 0.15) and isinstance(record, Prevote | Precommit):
                return self._say_unknown(record)
        share = {None: 0.6, True: 0.7, False: 0.1}[planned]
        if not self._does("two_votes" if planned is None else "plan", share):
            return super().say(record, proof)
        return self._say_two(record, planned=bool(planned))

    def _say_two(self, record: Proposal | Prevote | Precommit, *, planned: bool) -> Sequence[rounds.Output]:
        own, other = seal(record, self.name), seal(self._other(record), self.name)
        names = list(self.world.peers)
        victims = [name for name in names if self._random.random() < 0.5]
        if planned:
            victims = [self._random.choice(names)] if isinstance(record, Precommit) else []
        self.log(f"says two {record.KIND}s {record.view}, one to {' '.join(map(self.world.label, victims))} alone")
        for target in names:
            self.send(target, "record", own if target in victims else other)
        value = self.world.opened(own) if isinstance(record, Proposal) else None
        return self.participant.on_said(own, self.now, value and value.value)

    def _say_unknown(self, record: Prevote | Precommit) -> Sequence[rounds.Output]:
        """A vote for a set that nobody has, or for one that it has not looked at."""
        view = self.participant.agreement._views[record.view]
        value = view.proposed_id if view.proposal is not None and self._random.random() < 0.5 else sha256(b"unknown")
        other = replace(record, value=value)
        if isinstance(other, Precommit):
            other = replace(other, state_root=sha256(b"root"))
        self.log(f"says {record.KIND} {record.view} for what it does not have")
        signed: Any = seal(other, self.name)
        self._tell_all(signed)
        return self.participant.on_said(signed, self.now)

    def _plans(self, record: Proposal | Prevote | Precommit) -> bool | None:
        """Half of the liars have a plan, None for the others.

        It is to help everybody towards a lock, to let a single peer believe that the round is closed, and to win the
        others for another set.
        """
        if not self._has_plan:
            return None
        if isinstance(record, Precommit):
            return bool(record.value)
        return isinstance(record, Proposal) and record.view > 0

    def _other(self, record: Proposal | Prevote | Precommit) -> Proposal | Prevote | Precommit:
        """Something else that could stand in the same place."""
        chance = self._random.random()
        if isinstance(record, Proposal):
            return replace(record, value=self._other_set(record.value), valid_view=-1, polc=())
        if isinstance(record, Prevote):
            return replace(record, value=b"" if record.value and chance < 0.5 else sha256(b"unknown"))
        if chance < 0.5 and record.value:
            return replace(record, value=b"", state_root=b"")
        return replace(record, value=record.value or sha256(b"unknown"), state_root=sha256(b"root"))

    def _other_set(self, value: ProposedSet) -> ProposedSet:
        """A set with a good contribution left out or refused, or with claims left out."""
        chance = self._random.random()
        if not value.headers or (chance < 0.3 and (value.claims or value.releases)):
            return replace(value, claims=(), releases=())
        number = self._random.randrange(len(value.headers))
        headers = value.headers[:number] + value.headers[number + 1 :]
        if chance < 0.5:
            return replace(value, headers=headers)
        check = self._random.choice(("finite", "norm", "sections", "base"))
        opened = open_set(value)
        pairs = [*opened.refused, (check, opened.headers[number])]
        pairs.sort(key=lambda pair: pair[1].signer)
        refusals = tuple(Refusal(check=check, header=header.raw) for check, header in pairs)
        return replace(value, headers=headers, refusals=refusals)

    # ---- contributions -----------------------------------------------------------------------------------------

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        """Good, bad, too loud, or shown to a few only; and what was shown may be hidden later."""
        header, blobs = super().make_contribution()
        self._hides_after_vote = self._does("withheld", 0.5)
        if self._does("bad", 0.35):
            return self._bad(header, blobs)
        if self._does("partial", 0.3):
            peers = sorted(self.world.peers)
            shown_to = frozenset(self._random.sample(peers, self._random.randrange(len(peers))))
            self.log(f"shows its contribution to {' '.join(map(self.world.label, shown_to)) or 'nobody'} alone")
            return header, Blobs(blobs.verdict, self.name, shown_to)
        return header, blobs

    def _bad(self, header: Signed[Header], blobs: Blobs) -> tuple[Signed[Header], Blobs]:
        kind = self._random.choice(("finite", "loud", "base", "tokens"))
        self.log(f"makes a bad contribution: {kind}")
        if kind == "finite":
            return header, Blobs(Verdict("finite"), self.name)
        if kind == "loud":
            norms = tuple((name, 1e9) for name, _ in blobs.verdict.norms)
            return header, Blobs(Verdict(None, norms), self.name)
        wrong = {"state_root": sha256(b"elsewhere")} if kind == "base" else {"tokens": 2**30}
        return make_header(self.world.manifest, self.head, self.name, **wrong), blobs

    def _hide_blobs(self) -> None:
        """Everybody may have voted because these could be had."""
        for blobs in self.world.blobs.values():
            if blobs.maker == self.name:
                blobs.shown_to = frozenset()
        self.log("gives its blobs to nobody any more")

    # ---- answers -----------------------------------------------------------------------------------------------

    def on_network(self, sender: str, kind: str, content: Any) -> None:
        """Listen, remember what may be repeated, and answer questions about the ledger with lies."""
        if kind == "record" and len(self._heard) < HEARD_MAX and self._random.random() < 0.1:
            self._heard.append(content)
        if kind == "ask" and self._has_plan and self.world.is_in_model(self.head):
            return  # whoever has not heard how the round ended is not to hear it from here
        if kind == "ask" and self._does("usurp", 0.5) and (entry := self._usurped()) is not None:
            number, known = content
            first = self.disk.common(known)
            part = (*self.disk.chain[first : first + CHAIN_PART - 1], entry)
            self.log(f"answers {self.world.label(sender)} with a branch of its own")
            self.send(sender, "entries", (number, first, part, self.disk.reset_from(first)))
            return
        if kind == "ask" and self._does("ledger", 0.5):
            number, known = content
            first = self.disk.common(known)
            part = tuple(self._altered(entry) for entry in self.disk.chain[first : first + CHAIN_PART])
            self.log(f"answers {self.world.label(sender)} with an altered ledger")
            reset = self._random.choice((self.disk.reset_from(first), self._reset()))
            self.send(sender, "entries", (number, first, part, reset))
            return
        super().on_network(sender, kind, content)

    def presence(self) -> Presence:
        """A head that is its own, or one that does not exist."""
        if self._does("heads", 0.3):
            return self.head.round + self._random.choice((0, 1, 10**6)), sha256(b"a head")
        return super().presence()

    def offers(self, head: Head) -> bool:
        """Every state, whether it has it or not."""
        return self._does("heads") or super().offers(head)

    def _reset(self) -> Signed[Reset]:
        """A reset that no organizer has signed."""
        head = self.head
        record = Reset(
            run_id=head.run_id,
            number=head.resets + 1,
            parent=head.id,
            round=head.round,
            state_root=head.state_root,
            members=head.members,
        )
        return seal(record, self.name)

    def _usurped(self) -> Entry | None:
        """A commit that drops everybody else: its one vote is enough, where the others are believed to be gone."""
        head, manifest = self.head, self.world.manifest
        me = head.member(self.name)
        others = sorted(group for m in head.members if m.peer != self.name for group in m.groups)
        if me is None or not me.groups or not others or head.ended or manifest.rounds.on_majority_loss == "pause":
            return None
        value = make_set(head, headers=[make_header(manifest, head, self.name)], dropped=others)
        root = next_root(head.state_root, value.id)
        vote = Precommit(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            view=0,
            value=value.id,
            state_root=root,
            degraded=True,
        )
        body = commit_body(manifest, head, value, root)
        commit = Commit(body=body, view=0, precommits=(seal(vote, self.name).raw,))
        return Entry("commit", head, advanced(head, body, value), commit=commit)

    def _altered(self, entry: Entry) -> Entry:
        """A commit with votes missing, doubled, of others or for something else; or with another outcome."""
        if entry.commit is None or self._random.random() < 0.5:
            return entry
        commit, chance = entry.commit, self._random.random()
        if chance < 0.2:
            commit = replace(commit, precommits=commit.precommits[:1])
        elif chance < 0.4:
            commit = replace(commit, precommits=commit.precommits[:1] * len(commit.precommits))
        elif chance < 0.6:
            strangers = (seal(vote.record, peer_name(2000 + i)).raw for i, vote in enumerate(entry.votes))
            commit = replace(commit, precommits=tuple(strangers))
        elif chance < 0.8:
            commit = replace(commit, body=replace(commit.body, state_root=sha256(b"other")))
        else:
            commit = replace(commit, body=replace(commit.body, members=commit.body.members[1:]))
        return replace(entry, commit=commit)

    # ---- noise -------------------------------------------------------------------------------------------------

    def _make_noise(self) -> None:
        """Now and then: old messages, foreign ones, invented peers, votes far ahead."""
        self.after(self._random.uniform(*NOISE_SECONDS), self._make_noise)
        kinds = {
            "replay": self._repeat,
            "foreign": self._speak_of_elsewhere,
            "flood": self._invent_peers,
            "unknown_votes": self._vote_ahead,
        }
        lie = self._random.choice(sorted(kinds))
        if self.head.members and not self.head.ended and self._does(lie):
            kinds[lie]()

    def _repeat(self) -> None:
        """What was said earlier: in this round, in the last one, long ago."""
        for signed in self._heard[-5:]:
            self._tell_all(signed)
        self._heard = self._heard[: HEARD_MAX // 2]

    def _speak_of_elsewhere(self) -> None:
        """The same places in another run or epoch, signed by the same keys."""
        elsewhere = sha256(b"elsewhere")
        changes: dict[str, Any] = {"run_id": elsewhere} if self._random.random() < 0.5 else {"epoch": elsewhere}
        view = max(self.participant.agreement.view, 0)
        head, value = self.head, sha256(b"unknown")
        place: dict[str, Any] = {"run_id": head.run_id, "epoch": head.epoch, "round": head.round} | changes
        self._tell_all(seal(Prevote(**place, view=view, value=value), self.name))
        self._tell_all(seal(Precommit(**place, view=view, value=value, state_root=value), self.name))
        self._tell_all(make_header(self.world.manifest, head, self.name, **changes))
        if "run_id" in changes:
            claim = make_claim(head, self.name, 1)
            self._tell_all(seal(replace(claim.record, run_id=elsewhere), self.name))

    def _invent_peers(self) -> None:
        for _ in range(FLOOD_CLAIMS if self._random.random() < 0.3 else 3):
            name = peer_name(self._random.randrange(1000, 5000))
            self._tell_all(make_claim(self.head, name, self._random.randrange(2)))
        header: Signed[Header] = seal(make_header(self.world.manifest, self.head, self.name).record, peer_name(999))
        self._tell_all(header)

    def _vote_ahead(self) -> None:
        head = self.head
        record = Prevote(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round + self._random.randrange(2),
            view=self._random.randrange(1, 10**5),
            value=sha256(b"unknown"),
        )
        self._tell_all(seal(record, self.name))

    def _tell_all(self, signed: Signed[Any]) -> None:
        self.world.network.broadcast(self, "record", signed)
