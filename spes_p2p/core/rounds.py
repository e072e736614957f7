"""One peer's part in the run, round after round, as a pure machine (SPEC 5).

    collect headers --2/3 of groups--> cut training, wait `grace` --> blobs checked --> agreement --> Committed
         ^                                                                                              |
         +------------------------------- on_head: the next round ---------------------------------------+

`Participant` decides; its shell (`spes_p2p.peer`, or the simulator) only moves bytes: it signs what `Say` names,
fetches what `Fetch` names, applies what `Apply` names, and re-arms one timer from `next_deadline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from spes_p2p.core import agreement
from spes_p2p.core.agreement import Agreement
from spes_p2p.core.building import REFUSALS_MAX, Pooled, build_set, of_kind
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import (
    Verdict,
    check_header,
    check_refusal,
    checked_by_blob,
    expected_sections,
    norm_offenders,
)
from spes_p2p.core.ledger import (
    check_claim_place,
    check_evidence,
    check_order,
    check_release,
    check_set_place,
    commit_body,
)
from spes_p2p.core.outputs import (
    Abstain,
    Apply,
    Behind,
    Build,
    Check,
    Committed,
    Cut,
    Decided,
    Doubled,
    Fetch,
    Halt,
    Help,
    Refused,
    Relented,
    Resend,
    RootsDiffer,
    Say,
)
from spes_p2p.core.patience import Patience
from spes_p2p.core.views import Leniency, Timeouts
from spes_protocols.errors import RemoteError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import (
    Ban,
    Claim,
    DoubleVote,
    End,
    Header,
    Precommit,
    Prevote,
    Proposal,
    Release,
    Signed,
    VerifiedSet,
)

POOL_MAX = 1024
"""Claims of outsiders that are kept for a coming set; more are dropped, they will be sent again."""


RoundMessage = Signed[Header] | Pooled | Signed[Proposal] | Signed[Prevote] | Signed[Precommit]
Output = (
    Fetch | Cut | Committed | Behind | Help | Refused | Relented | Doubled
    | Apply | Say | Resend | RootsDiffer | Halt | Abstain
)  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """A proposal's content, opened where signatures are checked."""

    value: VerifiedSet
    polc: tuple[Signed[Prevote], ...]


class Participant:
    """Follows the ledger and takes part in each round; a standby or a peer outside the table has no votes."""

    def __init__(self, manifest: Manifest, me: str, head: Head) -> None:
        self.manifest = manifest
        self.me = me
        self._early: dict[tuple[str, str], tuple[RoundMessage, Opened | None]] = {}
        self._pool: dict[tuple[str, str], Pooled] = {}
        self._doubled: dict[str, DoubleVote] = {}
        self.unreachable: frozenset[str] = frozenset()
        """Who cannot be reached at present, as its owner knows; of no matter but for how long to wait for others."""
        self._begin(head)

    def _begin(self, head: Head) -> None:
        rules = self.manifest.rounds
        self.head = head
        self.headers: dict[str, Signed[Header]] = {}
        self.verdicts: dict[bytes, Verdict] = {}
        self._asked: set[bytes] = set()
        self._offers: dict[str, Signed[Header]] = {}
        self._electorate = head.electorate
        self._senders = [m.peer for m in head.members if expected_sections(self.manifest, head, m.peer)]
        self._seen_at = 0.0
        self.patience = Patience(rules, self.me)
        self._has_cut = False
        self._grace_until: float | None = None
        self._blobs_until: float | None = None
        self._building: int | None = None
        self._to_check: dict[bytes, VerifiedSet] = {}
        self._resend_at: float | None = None
        timeouts = Timeouts(
            propose_seconds=rules.propose_seconds,
            vote_seconds=rules.vote_seconds,
            check_seconds=rules.blob_seconds,
            growth=rules.view_growth,
            longest_seconds=rules.stall_seconds,
        )
        self.agreement = Agreement(self._electorate, timeouts, self.me, head.run_id, head.epoch, head.round)

    # ---- what goes in ------------------------------------------------------------------------------------------

    def on_head(
        self, head: Head, now: float, mine: Iterable[Signed[Any]] = (), sets: Iterable[VerifiedSet] = (),
        header: Signed[Header] | None = None,
    ) -> list[Output]:  # fmt: skip
        """The ledger moved on, or back: begin its round, with what this peer had said in that place (`restore`)."""
        self._begin(head)
        outputs = self.restore(mine, sets, header, now)
        self._pool = {key: message for key, message in self._pool.items() if self._pool_problem(message) is None}
        self._doubled = {peer: pair for peer, pair in self._doubled.items() if self._is_evidence(pair)}
        early, self._early = self._early, {}
        for message, opened in early.values():
            outputs += self.on_message(message, now, opened=opened)
        return outputs

    def restore(
        self, mine: Iterable[Signed[Proposal] | Signed[Prevote] | Signed[Precommit]],
        sets: Iterable[VerifiedSet], header: Signed[Header] | None, now: float,
    ) -> list[Output]:  # fmt: skip
        """Take up what this peer itself had said in this place before (SPEC 5.6), perhaps in another branch (5.13)."""
        mine, known = tuple(mine), {value.id: value for value in sets}
        outputs: list[Output] = []
        if mine:
            here = {id: value for id, value in known.items() if value.value.parent == self.head.id}
            self.agreement.restore(mine, here, elsewhere=known.keys() - here.keys())
            outputs += self._absorb(self.agreement.start(now), now)
        if header is not None and header.record.base == self.head.id:
            outputs += self.on_message(header, now)
        return outputs

    def expects(self, proposal: Signed[Proposal]) -> bool:
        """Whether a proposal is worth opening: from the leader of its view, or an owner's for the coming round."""
        epoch, number = self._place(proposal.record)
        if (epoch, number) == (self.head.epoch, self.head.round):
            return not self.head.ended and self.agreement.expects(proposal)
        early = (proposal.signer, Proposal.KIND)
        return (
            number == self.head.round + 1 and proposal.signer in self._electorate.weights and early not in self._early
        )

    def on_message(
        self, message: RoundMessage, now: float, *, opened: Opened | None = None, sender: str | None = None
    ) -> list[Output]:
        """A verified message, or an own header; a proposal with its content opened, unless it was not expected.

        A `sender` that is not the signer has passed it on, which does not show that the signer is there.
        """
        record = message.record
        if isinstance(record, Claim | Release | Ban | End):
            return self._on_pooled(message)  # type: ignore[arg-type]
        epoch, number = self._place(record)
        if (epoch, number) != (self.head.epoch, self.head.round):
            return self._elsewhere(message, opened, epoch, number, now)
        if self.head.ended or not self._electorate.owners:
            return []
        if message.signer in self._electorate.weights:  # nobody else may make this peer impatient
            is_direct = sender in (None, message.signer) and not isinstance(record, Proposal)
            self.patience.hear(message.signer if is_direct else None, now)
        if isinstance(record, Header):
            return self._on_header(message, now)  # type: ignore[arg-type]
        if isinstance(record, Proposal):
            if opened is None:
                return []
            outputs = self.agreement.on_proposal(message, opened.value, opened.polc, now)  # type: ignore[arg-type]
        else:
            outputs = self.agreement.on_vote(message, now)  # type: ignore[arg-type]
        begun = isinstance(record, Proposal) and record.view == 0 and message.signer == self._electorate.leader(0)
        if self.agreement.view < 0 and (begun or self.agreement.is_called):
            outputs += self.agreement.start(now)  # no reason to wait for our own timers
        return self._absorb(outputs, now)

    def on_said(
        self,
        message: Signed[Proposal] | Signed[Prevote] | Signed[Precommit],
        now: float,
        value: VerifiedSet | None = None,
    ) -> list[Output]:
        """An own proposal (with its set) or vote, signed and on disk."""
        if self._place(message.record) != (self.head.epoch, self.head.round):
            return []
        return self._absorb(self.agreement.on_said(message, now, value), now)

    def on_checked(self, header_id: bytes, verdict: Verdict, now: float) -> list[Output]:
        """The blobs of a header were fetched and checked, or are known to be bad."""
        self.verdicts[header_id] = verdict
        outputs = self._check_sets(now)
        return outputs + self._advance(now)

    def on_applied(self, value_id: bytes, state_root: bytes, now: float) -> list[Output]:
        """`Apply` is done."""
        return self._absorb(self.agreement.on_applied(value_id, state_root, now), now)

    def on_tick(self, now: float) -> list[Output]:
        """Let everything happen that is due."""
        self._seen_at = now
        outputs = self._relent(now)
        outputs += self._absorb(self.agreement.on_tick(now), now)
        if self._resend_at is not None and self._resend_at <= now:
            self._resend_at = now + self.manifest.rounds.vote_seconds
            mine = self.headers.get(self.me)
            # Who says nothing more is no longer heard, so that the others can go on without it.
            if mine is not None and not self.agreement.decided and not self.agreement.abstains:
                outputs.append(Resend((mine,)))  # type: ignore[arg-type]
        return outputs + self._advance(now)

    @property
    def next_deadline(self) -> float | None:
        """When `on_tick` is due at the latest, None when only messages can change anything."""
        if self.agreement.decided or self.head.ended:
            return None
        deadlines = [self.agreement.next_deadline, self._resend_at]
        if self._may_relent:
            deadlines.append(self.patience.next_look(self.agreement.leniency))
        if self.agreement.view < 0 or self._building is not None:
            # Once they have passed, only messages and verdicts change anything.
            deadlines += [d for d in (self._grace_until, self._blobs_until) if d is not None and d > self._seen_at]
        return min((d for d in deadlines if d is not None), default=None)

    @property
    def phase(self) -> str:
        """Where the round stands, in a word for the person at the machine."""
        if self.head.ended:
            return "ended"
        if not self._electorate.owners:
            return "waiting"
        if self.agreement.halted:
            return "halted"
        if self.agreement.view >= 0:
            return "agreeing"
        return "collecting" if self._grace_until is not None else "training"

    def pooled(self) -> tuple[Pooled, ...]:
        """Claims, releases and orders heard of and not yet in a commit."""
        return tuple(message for _, message in sorted(self._pool.items()))

    def claims(self) -> tuple[Signed[Claim], ...]:
        """The claims among them, in ascending order of claimant."""
        return tuple(of_kind(self.pooled(), Claim))

    # ---- when a round does not close -------------------------------------------------------------------------------

    def _relent(self, now: float) -> list[Output]:
        """Waiting cuts training short, then makes this peer consent to ever less (SPEC 5.12)."""
        if not self._may_relent:
            return []
        leniency = self.patience.look(now)
        self.agreement.present = frozenset(o for o in self._electorate.owners if self.patience.is_there(o, now))
        outputs = self._cut() if self.patience.is_half_over else []
        if leniency <= self.agreement.leniency:
            return outputs
        outputs.append(Relented(leniency, self.patience.waited_seconds))
        if self._grace_until is None:
            self._grace_until, self._blobs_until = now, now + self.manifest.rounds.blob_seconds
        return outputs + self._absorb(self.agreement.relent(leniency, now), now) + self._advance(now)

    def follows_few(self, gone: Collection[str], now: float) -> bool:
        """Whether a commit of a few for this round that drops the owners `gone` is taken from another's ledger.

        This peer has waited as long as its makers, and hears none of the others whom it drops (SPEC 5.12): or one liar
        could drop all who go on. After as long again that counts no more, for those who are heard may be of no help.
        """
        if self.agreement.leniency < Leniency.ANY:
            return False
        is_over = not self._may_relent or self.patience.waited_seconds >= 2 * self.manifest.rounds.lease_seconds
        return is_over or not any(peer != self.me and self.patience.is_there(peer, now) for peer in gone)

    @property
    def _may_relent(self) -> bool:
        return bool(self._electorate.owners) and not (self.agreement.decided or self.agreement.halted)

    def _cut(self) -> list[Output]:
        if self._has_cut or self.me not in self._senders or self.me in self.headers:
            return []
        self._has_cut = True
        return [Cut()]

    def _dropped(self, now: float) -> tuple[int, ...] | None:
        """The groups to drop: of owners who are gone, or have contributed nothing that could be in a set.

        None when too few would be left.
        """
        base = self.agreement.valid_set
        useful = {header.signer for _, header in self._judged_headers()} if base is None else self._electorate.owners
        kept = {peer for peer in useful if self.patience.is_there(peer, now)}
        weight = self._electorate.weight(kept)
        has_majority = self._electorate.is_majority(weight)
        already = () if base is None else base.value.dropped
        if base is not None and has_majority:
            return already  # those who are locked on it take no other that keeps a majority
        if self._electorate.is_quorum(weight):
            return ()
        if not kept or self.agreement.leniency < (Leniency.MAJORITY if has_majority else Leniency.ANY):
            return None
        gone = {group for peer, groups in self._electorate.groups.items() if peer not in kept for group in groups}
        return tuple(sorted(gone.union(already)))

    def _is_evidence(self, pair: DoubleVote) -> bool:
        try:
            check_evidence(self.head, pair)
        except RemoteError:
            return False
        return True

    def _on_doubled(self, pair: DoubleVote) -> list[Output]:
        """Somebody contradicts itself: keep the proof, and show it to the others once."""
        first, second = pair
        if first.signer in self._doubled or first.signer == self.me or not self._is_evidence(pair):
            return []
        self._doubled[first.signer] = pair
        return [Doubled(first, second), Resend((first, second))]  # type: ignore[arg-type]

    # ---- headers, claims, releases, orders ---------------------------------------------------------------------

    def _place(self, record: Header | Proposal | Prevote | Precommit) -> tuple[bytes, int]:
        inner = record.value if isinstance(record, Proposal) else record
        return inner.epoch, inner.round

    def _elsewhere(
        self, message: RoundMessage, opened: Opened | None, epoch: bytes, number: int, now: float
    ) -> list[Output]:
        if message.signer == self.me:
            return []
        if number > self.head.round and message.signer in self._electorate.weights:
            self.patience.hear(None, now)  # others go on without this round, which may be why nothing comes
        if epoch != self.head.epoch or number > self.head.round:
            useful = opened is not None or not isinstance(message.record, Proposal)
            if useful and number == self.head.round + 1 and self.head.member(message.signer) is not None:
                self._early[(message.signer, message.record.KIND)] = (message, opened)  # one each: all are sent again
            return [Behind(message.signer, number)]
        return [Help(message.signer)] if isinstance(message.record, Prevote | Precommit | Header) else []

    def _on_pooled(self, message: Pooled) -> list[Output]:
        problem = self._pool_problem(message)
        if problem is not None:
            return [Refused(message.signer, problem.check, problem.detail)]
        record = message.record
        key = (record.KIND, record.peer if isinstance(record, Ban) else message.signer)
        known = self._pool.get(key)
        claimed = known.record.round if known is not None and isinstance(known.record, Claim) else 0
        if isinstance(record, Claim) and record.round < claimed:
            return []  # anybody may play an older one again
        is_outsider = isinstance(record, Claim) and self.head.member(message.signer) is None
        if not is_outsider or key in self._pool or len(self._pool) < POOL_MAX:
            self._pool[key] = message
        return []

    def _pool_problem(self, message: Pooled) -> RemoteError | None:
        record = message.record
        try:
            if isinstance(record, Claim):
                check_claim_place(self.manifest, self.head, message)  # type: ignore[arg-type]
                member = self.head.member(message.signer)
                if member is not None and member.wants == record.wants:
                    raise RemoteError("claim", "stands in the member table already", message.signer)
            elif isinstance(record, Release):
                check_release(self.head, message)  # type: ignore[arg-type]
            else:
                check_order(self.manifest, self.head, message)  # type: ignore[arg-type]
        except RemoteError as error:
            return error
        return None

    def _on_header(self, signed: Signed[Header], now: float) -> list[Output]:
        peer = signed.signer
        known = self.headers.get(peer) or self._offers.get(peer)
        if known is not None:
            return [] if known.record == signed.record else self._on_doubled((known, signed))
        outputs: list[Output] = []
        try:
            check_header(self.manifest, self.head, signed)
            self.headers[peer] = signed
            outputs += self._ask(signed)
        except RemoteError as error:
            has_room = peer in self._electorate.weights or len(self._offers) < REFUSALS_MAX
            if has_room and self._is_provable(error.check, signed):
                self._offers[peer] = signed
                self.verdicts[signed.id] = Verdict(error.check)
            outputs.append(Refused(peer, error.check, error.detail))
        if peer == self.me and peer in self.headers:
            self._resend_at = now + self.manifest.rounds.vote_seconds
        if self._grace_until is None and self._has_quorum():
            self._grace_until = now + self.manifest.rounds.grace_seconds
            self._blobs_until = self._grace_until + self.manifest.rounds.blob_seconds
            outputs += self._cut()
        return outputs + self._advance(now)

    def _ask(self, signed: Signed[Header]) -> list[Output]:
        if signed.id in self.verdicts or signed.id in self._asked:
            return []
        self._asked.add(signed.id)
        return [Fetch(signed)]

    def _has_quorum(self) -> bool:
        return self._electorate.is_quorum(self._electorate.weight([*self.headers, *self._offers]))

    # ---- from collecting to agreeing ---------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Output]:
        """Begin the agreement once the headers are in, or their time is up; build when this peer leads."""
        if self.agreement.decided or self.head.ended or self._grace_until is None:
            return []
        outputs: list[Output] = []
        if self.agreement.view < 0 and self._collected(now):
            outputs += self._absorb(self.agreement.start(now, self._leader_seconds(now)), now)
        if self._building is not None and self._collected(now):
            view, self._building = self._building, None
            value = self._build(now)
            if value is not None:
                outputs += self._absorb(self.agreement.on_built(view, value), now)
            else:
                self._building = view
        return outputs

    def _leader_seconds(self, now: float) -> float:
        """How long at least a leader that is there may take: once more what the collecting took, at a slower line."""
        leader = self._electorate.leader(0)
        if self._grace_until is None or self.agreement.leniency or leader in self.unreachable:
            return 0.0
        began = self._grace_until - self.manifest.rounds.grace_seconds
        return now - began if self.patience.is_there(leader, now) else 0.0

    def _collected(self, now: float) -> bool:
        """All members' headers are in or `grace` is over; and their blobs are checked or their time is over too.

        Nobody waits for a member that can be neither reached nor heard.
        """
        assert self._grace_until is not None
        assert self._blobs_until is not None
        awaited = (peer for peer in self._senders if peer not in self.headers and peer not in self._offers)
        gone = (peer in self.unreachable and not self.patience.is_there(peer, now) for peer in awaited)
        if now < self._grace_until and not all(gone):
            return False
        checked = all(header.id in self.verdicts for header in self.headers.values())
        return checked or now >= self._blobs_until

    def _build(self, now: float) -> VerifiedSet | None:
        """The set this leader proposes: all it could check, refusals by name, and what the pool holds.

        What does not fit is left out, whatever others have pushed: good contributions of owners come first. One that
        has relented drops the owners who are gone.
        """
        dropped = self._dropped(now) if self.agreement.leniency else ()
        base = self.agreement.valid_set
        if dropped is None:
            return None
        if base is not None:
            return replace(base, value=replace(base.value, dropped=dropped))
        pool = [message for message in self.pooled() if self._pool_problem(message) is None]
        return build_set(self.head, self._judged_headers(), self._norm_offenders, pool, self._doubled, dropped)

    def _judged_headers(self) -> list[tuple[str | None, Signed[Header]]]:
        """(failed check or None, header) of all that may be in a set, in order: owners first, then good ones first."""
        judged = []
        for header in (self.headers | self._offers).values():
            verdict = self.verdicts.get(header.id)
            if verdict is not None and (verdict.check is None or self._is_provable(verdict.check, header)):
                judged.append((verdict.check, header))
        weights = self._electorate.weights
        return sorted(judged, key=lambda pair: (pair[1].signer not in weights, pair[0] is not None, pair[1].signer))

    def _is_provable(self, check: str, header: Signed[Header]) -> bool:
        try:
            check_refusal(self.manifest, self.head, check, header)
        except RemoteError:
            return False
        return True

    def _norm_offenders(self, headers: Iterable[Signed[Header]]) -> frozenset[str]:
        norms = {h.signer: dict(self.verdicts[h.id].norms) for h in headers}
        return norm_offenders(norms, self._electorate.weights, self.manifest.rounds.norm_limit)

    # ---- checking a proposed set -------------------------------------------------------------------------------

    def _check_sets(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        for value_id, value in list(self._to_check.items()):
            valid = self._judge(value)
            if valid is not None:
                self._to_check.pop(value_id, None)
                outputs += self._absorb(self.agreement.on_checked(value_id, valid, now), now)
        return outputs

    def _judge(self, value: VerifiedSet) -> bool | None:
        """True or False by rules that any member can recompute, None while blobs are missing (SPEC 5.5)."""
        verdicts = [(claimed, h, self.verdicts.get(h.id)) for claimed, h in checked_by_blob(value)]
        for claimed, _, verdict in verdicts:
            if verdict is None:
                return None
            if verdict.check != (None if claimed == "norm" else claimed):
                return False
        counted = [h for claimed, h, _ in verdicts if claimed in (None, "norm")]
        return self._norm_offenders(counted) == {h.signer for claimed, h, _ in verdicts if claimed == "norm"}

    def _on_check(self, value: VerifiedSet, now: float) -> list[Output]:
        value_id = value.id
        try:
            check_set_place(self.manifest, self.head, value)
        except RemoteError:
            return self._absorb(self.agreement.on_checked(value_id, False, now), now)
        self._to_check[value_id] = value
        outputs: list[Output] = []
        for _, header in checked_by_blob(value):
            outputs += self._ask(header)
        return outputs + self._check_sets(now)

    def _absorb(self, outputs: list[agreement.Output], now: float) -> list[Output]:
        """Answer what the agreement asks of this machine, pass on the rest to the shell."""
        result: list[Output] = []
        for output in outputs:
            if isinstance(output, Build):
                self._building = output.view
                result += self._advance(now)
            elif isinstance(output, Check):
                result += self._on_check(output.value, now)
            elif isinstance(output, Decided):
                body = commit_body(self.manifest, self.head, output.value, output.state_root)
                result.append(Committed(body, output.value, output.view, output.precommits))
            elif isinstance(output, Doubled):
                result += self._on_doubled((output.first, output.second))
            else:
                result.append(output)
        return result
