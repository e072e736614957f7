"""A run's log made by hand, without a network: real keys, records, votes, blobs, states and stores.

`RunLog` is the swarm in one object: `header` signs a contribution with random deltas, `close_round` does with it what
a quorum agrees on, `close_with` what those do who are left, `fork` goes on elsewhere from the same record. `play` is a
run of five rounds with everything that the ledger of a good time can hold, `play_degraded` one of a bad time; `flip`
damages a log.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from spes_p2p.core.ledger import commit_body, start_record
from spes_p2p.core.roots import state_root
from spes_p2p.core.tensors import section_specs
from spes_p2p.crypto.envelope import seal, verify_set
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.codecs import write_section
from spes_p2p.delta.contributions import apply_set, contributions
from spes_p2p.delta.genesis import genesis_root, genesis_tensors
from spes_p2p.store.chain import Chain, Step
from spes_p2p.store.rundir import RunDir
from spes_protocols import manifest as m
from spes_protocols.codec import encode
from spes_protocols.messages import (
    SHARED,
    Ban,
    Claim,
    Commit,
    DoubleVote,
    End,
    Evidence,
    Header,
    Member,
    Precommit,
    Prevote,
    ProposedSet,
    Refusal,
    Release,
    Reset,
    Section,
    Signed,
    VerifiedSet,
    group_section,
)
from tests.unit.delta_support import random_arrays

ORGANIZER, ADA, BOB, EVE = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 5))

MODEL = m.Model(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    sequence_length=16,
)
STEPS = 2
"""H: schedule steps in a round."""


def shard(path: Path, tokens: int) -> m.Shard:
    """A file as a manifest describes it."""
    data = path.read_bytes()
    return m.Shard(url=path.as_uri(), sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), tokens=tokens)


def make_data(folder: Path) -> m.Data:
    """A tokenizer of 64 words, a training and a held-out file of their numbers, written to `folder`."""
    tokenizer_path = folder / "tokenizer.json"
    words = {f"w{number}": number for number in range(MODEL.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tokenizer_path))
    shards = {}
    for name, count in (("train", 600), ("heldout", 200)):
        tokens = np.random.default_rng(count).integers(0, MODEL.vocab_size, count)
        np.save(folder / f"{name}.npy", tokens.astype(np.uint16))
        shards[name] = shard(folder / f"{name}.npy", count)
    record = shard(tokenizer_path, 1)
    return m.Data(
        sources=(m.Source(name="train", format="npy", shards=(shards["train"],)),),
        heldout=m.Source(name="heldout", format="npy", shards=(shards["heldout"],)),
        heldout_bytes=400,
        tokenizer=m.Tokenizer(url=record.url, sha256=record.sha256, bytes=record.bytes, eos_id=0),
    )


def make_manifest(folder: Path, **changes: Any) -> m.Manifest:
    """A run of two expert groups that merges in every second round; data files go to `folder`."""
    record = m.Manifest(
        name="by hand",
        seed=5,
        model=MODEL,
        ownership=m.Ownership(groups=2, min_peers=2),
        optimizer=m.Optimizer(lr=0.01, warmup_steps=2, total_steps=100),
        rounds=m.Rounds(phases=(m.Phase(from_step=0, steps=STEPS, batch_sequences=4),), offences_max=10),
        merging=m.Merging(alpha=0.2, interval=2 * STEPS, until_step=1000, top=2),
        data=make_data(folder),
        organizer=m.Organizer(keys=(ORGANIZER.peer_id,)),
    )
    record = replace(record, **changes)
    return replace(record, genesis_root=genesis_root(record.model, record.ownership.groups, record.seed))


def by_signer(signed: Iterable[Signed[Any]]) -> tuple[bytes, ...]:
    """Envelopes in the order that lists in records have."""
    return tuple(s.raw for s in sorted(signed, key=lambda s: s.signer))


class RunLog:
    """One run whose members all do as they are told. The log is kept as by ADA, in `folder / "home"`."""

    def __init__(
        self, folder: Path, *, manifest: m.Manifest | None = None, first_seed: int | None = None, **changes: Any
    ) -> None:
        """Begin a run with the manifest given, or with that of `make_manifest` and these changes.

        `first_seed`: S_0 is of another seed than the manifest's, which names it by its root.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.home = folder / "home"
        self.manifest = manifest or make_manifest(folder, **changes)
        self.run = RunDir.create(self.home, seal(self.manifest, ORGANIZER).raw)
        self.db = self.run.ledger()
        self.blobs = self.run.blobs()
        self.states = self.run.states()
        self.chain = Chain(self.manifest, self.run.run_id, self.db)
        self._seed = self._salt = 0
        with self.states.writer(0) as writer:
            seed = self.manifest.seed if first_seed is None else first_seed
            for name, array in genesis_tensors(MODEL, self.manifest.ownership.groups, seed):
                writer.add(name, array)
            writer.commit()

    def close(self) -> None:
        """Close the ledger, whose file is then all of it."""
        self.db.close()

    # ---- records -----------------------------------------------------------------------------------------------

    def claim(self, peer: Identity, wants: int = 1, groups: tuple[int, ...] = ()) -> Signed[Claim]:
        """A claim by what the ledger says now."""
        head = self.chain.head
        record = Claim(
            run_id=head.run_id, round=head.round, commit=head.id, state_root=head.state_root, groups=groups, wants=wants
        )
        return seal(record, peer)

    def release(self, peer: Identity) -> Signed[Release]:
        """A leave after this round."""
        head = self.chain.head
        return seal(Release(run_id=head.run_id, epoch=head.epoch, round=head.round), peer)

    def start(self, claims: Sequence[Signed[Claim]]) -> Step:
        """The organizer opens the run with these claims."""
        return self._append("start", seal(start_record(self.manifest, self.chain.head, claims), ORGANIZER).raw)

    def reset(self, to: Step, members: tuple[Member, ...]) -> Step:
        """The organizer goes back to the commit `to`."""
        after = to.after
        record = Reset(
            run_id=after.run_id,
            number=self.chain.head.resets + 1,
            parent=after.id,
            round=after.round,
            state_root=after.state_root,
            members=members,
        )
        return self._append("reset", seal(record, ORGANIZER).raw)

    def double_vote(self, peer: Identity, *, view: int = 0) -> DoubleVote:
        """Two prevotes of a peer in one place of the round in hand: for nil, and for a set that nobody proposed.

        Two headers make evidence too: `(log.header(EVE), log.header(EVE))`.
        """
        head = self.chain.head
        nil = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=view, value=b"")
        return seal(nil, peer), seal(replace(nil, value=bytes(32)), peer)

    def fork(self, folder: Path) -> RunLog:
        """The same run as another part of the swarm has it: what is here now, and then its own way.

        Both are to be closed in the end. Later deltas are of other seeds, so that equal rounds give other states.
        """
        other = RunLog(folder, manifest=self.manifest)
        for kind, data in self.db.chain(0, self.chain.length):
            other._append(kind, data)
        other._copy_files(self)
        other._seed, other._salt = self._seed, self._salt + 1000
        return other

    def adopt(self, other: RunLog) -> None:
        """Take over the branch of a fork, which must be the better one, with its blobs and states."""
        position = self.chain.common(other.chain.known())
        branch = self.chain.branch(position)
        assert branch is not None
        for kind, data in other.db.chain(position, other.chain.length):
            branch.add(kind, data)
        assert branch.is_better
        self.chain.adopt(branch.steps)
        self.keep_states()
        self._copy_files(other)

    def _copy_files(self, other: RunLog) -> None:
        shutil.copytree(other.run.blobs_dir, self.run.blobs_dir, dirs_exist_ok=True)
        shutil.copytree(other.run.snapshots_dir, self.run.snapshots_dir, dirs_exist_ok=True)

    def _append(self, kind: str, data: bytes) -> Step:
        step = self.chain.check(kind, data)
        self.chain.append(step)
        return step

    # ---- contributions -----------------------------------------------------------------------------------------

    def section(self, name: str, scale: float = 1e-3, *, finite: bool = True) -> Section:
        """A section of random deltas, its blob stored; one that is not finite has a NaN among its scales."""
        self._seed += 1
        specs = section_specs(MODEL, self.manifest.ownership.groups, name)
        codec = self.manifest.codecs.of(name)
        path = self.folder / "section"
        write_section(specs, random_arrays(specs, self._salt + self._seed, scale), codec, path)
        data = bytearray(path.read_bytes())
        if not finite:
            begin = 8 + int.from_bytes(data[:8], "little")
            data[begin : begin + 2] = b"\xc0\x7f"
        return Section(name=name, codec=codec, blob=self.blobs.put(bytes(data)), size=len(data))

    def header(
        self, peer: Identity, *, scale: float = 1e-3, finite: bool = True, steps: int = STEPS
    ) -> Signed[Header]:  # fmt: skip
        """A contribution of everything that the peer is to send."""
        head = self.chain.head
        member = head.member(peer.peer_id)
        groups = () if member is None else member.groups
        names = (SHARED, *(group_section(group) for group in groups))
        record = Header(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            base=head.id,
            state_root=head.state_root,
            sections=tuple(self.section(name, scale, finite=finite) for name in names),
            tokens=100 + self._seed,
            steps=steps,
            loss=4_000_000 - 1000 * self._seed,
        )
        return seal(record, peer)

    def close_round(
        self,
        headers: Sequence[Signed[Header]],
        *,
        root: bytes | None = None,
        voters: Sequence[Identity] = (ADA, BOB),
        degraded: bool = False,
        **parts: Any,
    ) -> Step:
        """Apply a set and commit it; `parts` as in `proposed`, `root` is what is voted for instead of the true root.

        `degraded`: the voters have waited and consent to a commit by fewer than a quorum (SPEC 5.12).
        """
        value = self.proposed(headers, **parts)
        agreed = self.apply(value) if root is None else root
        return self._append("commit", encode(self.commit(value, agreed, voters, degraded=degraded)))

    def close_with(self, *present: Identity, **parts: Any) -> Step:
        """Close a round with those present alone: they contribute and consent, all other owners lose their groups.

        `parts` as in `proposed`. The strength is what the groups of `present` amount to: with half of the owned
        groups or less it is "any", with more "majority", with two thirds and more "final".
        """
        here = {peer.peer_id for peer in present}
        gone = sorted(g for member in self.chain.head.members if member.peer not in here for g in member.groups)
        headers = [self.header(peer) for peer in present]
        return self.close_round(headers, dropped=gone, voters=present, degraded=True, **parts)

    def proposed(
        self,
        headers: Sequence[Signed[Header]],
        *,
        refused: Sequence[tuple[str, Signed[Header]]] = (),
        claims: Sequence[Signed[Claim]] = (),
        releases: Sequence[Signed[Release]] = (),
        orders: Sequence[Signed[Ban] | Signed[End]] = (),
        evidence: Sequence[DoubleVote] = (),
        dropped: Sequence[int] = (),
    ) -> VerifiedSet:
        """The set of a round, its lists in order."""
        head = self.chain.head
        refusals = sorted(refused, key=lambda pair: pair[1].signer)
        pairs = sorted(evidence, key=lambda pair: pair[0].signer)
        return verify_set(
            ProposedSet(
                run_id=head.run_id,
                epoch=head.epoch,
                round=head.round,
                parent=head.id,
                headers=by_signer(headers),
                refusals=tuple(Refusal(check=check, header=header.raw) for check, header in refusals),
                claims=by_signer(claims),
                releases=by_signer(releases),
                orders=by_signer(orders),
                evidence=tuple(Evidence(first=one.raw, second=other.raw) for one, other in pairs),
                dropped=tuple(dropped),
            )
        )

    def apply(self, value: VerifiedSet) -> bytes:
        """Store the state after a set; its root."""
        head = self.chain.head
        with self.states.writer(head.round + 1) as writer:
            apply_set(
                self.manifest,
                head.step,
                contributions(head, value),
                self.states.read(head.round),
                blob_path=self.blobs.path,
                write=writer.add,
            )
            return state_root(writer.commit())

    def commit(
        self, value: VerifiedSet, root: bytes, voters: Sequence[Identity] = (ADA, BOB), *, degraded: bool = False
    ) -> Commit:
        """The commit of a set with the precommits of these peers, ADA's own also where a peer keeps its own."""
        head = self.chain.head
        body = commit_body(self.manifest, head, value, root)
        vote = Precommit(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            view=0,
            value=value.id,
            state_root=root,
            degraded=degraded,
        )
        votes = [seal(vote, voter) for voter in voters]
        self.db.record_vote(head.epoch, head.round, 0, Precommit.KIND, seal(vote, ADA).raw)
        for header in value.headers:
            if header.signer == ADA.peer_id:
                self.db.put_own_header(head.epoch, head.round, header.raw)
        return Commit(body=body, view=0, precommits=by_signer(votes))

    def keep_states(self, *rounds: int) -> None:
        """Remove the other stored states."""
        for number in set(self.states.rounds()) - set(rounds):
            self.states.remove(number)


def play(folder: Path, **changes: Any) -> RunLog:
    """Five rounds: ADA and BOB own a group each, EVE comes in round 0 as a standby and is refused three times.

    Stored are the states of rounds 0, 2, 3 and 5, beside a blob that no commit names. 11 contributions count.
    """
    log = RunLog(folder, **changes)
    log.start([log.claim(ADA), log.claim(BOB)])
    log.close_round([log.header(ADA), log.header(BOB)], claims=[log.claim(EVE, wants=0)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)])
    log.close_round([log.header(ADA), log.header(BOB)], refused=[("finite", log.header(EVE, finite=False))])
    log.close_round([log.header(ADA), log.header(BOB)], refused=[("norm", log.header(EVE, scale=10.0))])
    log.close_round([log.header(ADA), log.header(BOB)], refused=[("sections", log.header(EVE, steps=STEPS + 1))])
    log.section(SHARED)
    log.keep_states(0, 2, 3, 5)
    return log


def play_degraded(folder: Path, **changes: Any) -> RunLog:
    """Five rounds of a run of four groups whose three owners have one each; all states are kept.

    Round 0 is final. In round 1 EVE is gone: a majority drops her. In round 2 she is a standby and gets a group again;
    it is final. In round 3 ADA is alone and drops BOB and EVE. Round 4 is hers alone and so final, and removes EVE, who
    has signed twice. 10 contributions count.
    """
    log = RunLog(folder, ownership=m.Ownership(groups=4, min_peers=3), **changes)
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)], voters=[ADA, BOB, EVE])
    log.close_with(ADA, BOB)
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)])
    log.close_with(ADA)
    log.close_round([log.header(ADA)], evidence=[log.double_vote(EVE)], voters=[ADA])
    return log


# ---- damage -----------------------------------------------------------------------------------------------------


def copy_log(log: RunLog, folder: Path) -> RunDir:
    """A copy of a closed log, to be damaged."""
    shutil.copytree(log.home, folder / "copy")
    return RunDir.open(folder / "copy" / "runs" / log.run.run_id.hex())


def flip(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flip_file(path: Path, bit: int | None = None) -> None:
    """Change one bit of a file, by default one in its middle."""
    data = path.read_bytes()
    path.write_bytes(flip(data, len(data) * 4 if bit is None else bit))


def flip_inside(data: bytes, part: bytes, bit: int | None = None) -> bytes:
    """Change one bit of a part that stands once in the data, by default one in the part's middle."""
    assert data.count(part) == 1
    at = 8 * data.index(part)
    return flip(data, at + (len(part) * 4 if bit is None else bit))


def records(run: RunDir) -> list[tuple[str, bytes]]:
    """The rows of a log's ledger: (kind, bytes)."""
    with run.ledger() as db:
        return db.chain(0, 1000)


def rewrite(run: RunDir, rows: Sequence[tuple[str, bytes]]) -> None:
    """Replace the chain of a log's ledger, whatever is in it."""
    with sqlite3.connect(run.ledger_path) as db:
        db.execute("DELETE FROM chain")
        for position, (kind, data) in enumerate(rows):
            id = hashlib.sha256(data + bytes([position])).digest()
            db.execute("INSERT INTO chain VALUES (?, ?, ?, ?, ?)", (position, kind, position, id, data))
    db.close()


def rewrite_record(run: RunDir, position: int, data: bytes) -> None:
    """Replace one record's bytes."""
    with sqlite3.connect(run.ledger_path) as db:
        db.execute("UPDATE chain SET bytes = ? WHERE position = ?", (data, position))
    db.close()
