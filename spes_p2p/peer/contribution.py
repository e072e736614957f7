"""From the trainer's files to a signed header, and back from a commit to the trainer's outcome (SPEC 5.1, 6.8)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from spes_p2p.core.head import Head
from spes_p2p.crypto.envelope import unseal
from spes_p2p.peer.shell import Shell
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.files import remove
from spes_p2p.store.rundir import RunDir
from spes_protocols import control_pb2
from spes_protocols.codec import decode
from spes_protocols.errors import UserError
from spes_protocols.messages import MICRO, Commit, Header, Section

RETRY_SECONDS = 5.0
"""Pause before a disk that did not take a contribution is asked again."""

LOSS_MAX = 1e6
"""Nats that stand for any loss as high, for one that overflowed and for one that is no number."""


class Publisher:
    """Publishes what the trainer has finished, once a round."""

    def __init__(
        self, run_dir: RunDir, chain: Chain, blobs: BlobStore, shell: Shell, log: Callable[[str], None]
    ) -> None:
        self._run_dir = run_dir
        self._chain = chain
        self._blobs = blobs
        self._shell = shell
        self._log = log
        self.seconds: dict[str, float] = {}

    async def on_done(self, done: control_pb2.RoundDone) -> None:
        """Store the blobs, sign the header, tell everybody; a round that is over is dropped.

        A disk that does not take it is asked again: the round may not be able to close without us.
        """
        head = self._chain.head
        fresh = [section.digest for section in done.sections if not self._blobs.has(section.digest)]
        try:
            if (done.epoch, done.round) != (head.epoch, head.round) or head.place(self._shell.participant.me) is None:
                return
            self.seconds["train"] = self.seconds.get("train", 0.0) + done.train_seconds
            self.seconds["encode"] = self.seconds.get("encode", 0.0) + done.encode_seconds
            while head.id == self._chain.head.id:
                try:
                    await self._publish(done, head)
                    return
                except UserError as error:
                    self._log(f"round {done.round}: our contribution cannot be stored yet: {error}")
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._shell.leftovers.note(fresh)  # whatever became of them
            with contextlib.suppress(UserError):  # the trainer removes what it finds there when it starts
                for section in done.sections:
                    remove(Path(section.path))

    async def _publish(self, done: control_pb2.RoundDone, head: Head) -> None:
        for section in done.sections:
            found = await asyncio.to_thread(self._blobs.put, Path(section.path))
            assert found == section.digest, f"{section.path} is not what the trainer wrote"
        if head.id != self._chain.head.id:
            return
        header = Header(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            base=head.id,
            state_root=head.state_root,
            sections=tuple(
                Section(name=s.name, codec=s.codec, blob=s.digest, size=s.size) for s in done.sections
            ),
            tokens=done.tokens,
            steps=done.steps,
            loss=_micro(done.loss),
        )  # fmt: skip
        self._shell.say(header)

    def fill_outcome(self, task: control_pb2.TrainRound, epoch: bytes, round_number: int) -> None:
        """Tell the trainer what became of the contribution of an earlier round, and which groups are new to it."""
        if (epoch, round_number) == (task.epoch, task.round):
            return
        task.has_outcome = True
        task.outcome_round = round_number
        if self._is_abandoned(epoch, round_number):
            task.outcome = control_pb2.ABANDONED
            return
        task.outcome = control_pb2.MISSED
        task.fresh.extend(self._not_owned_since(round_number, task.groups))
        raw, data = self._chain.db.own_header(epoch, round_number), self._chain.db.commit(round_number)
        if raw is None or data is None:
            return
        commit = decode(Commit, data)
        if commit.body.epoch == epoch and raw in commit.body.value.headers:
            task.outcome = control_pb2.COUNTED
            task.counted.extend(section.name for section in unseal(raw, Header).record.sections)
        elif any(refusal.header == raw for refusal in commit.body.value.refusals):
            task.outcome = control_pb2.REFUSED

    def _is_abandoned(self, epoch: bytes, round_number: int) -> bool:
        """Whether the head that a contribution went out from is no longer in the ledger (SPEC 6.8)."""
        raw = self._chain.db.own_header(epoch, round_number)
        if raw is not None:
            return self._chain.position_of(unseal(raw, Header).record.base) is None
        if self._chain.position_of(epoch) is None or round_number > self._chain.head.round:
            return True
        data = self._chain.db.commit(round_number)
        return data is not None and decode(Commit, data).body.epoch != epoch

    def _not_owned_since(self, round_number: int, groups: Iterable[int]) -> list[int]:
        """Those of our groups that some table after that round does not give us (SPEC 4.5)."""
        kept = set(groups)
        for number in range(round_number, self._chain.head.round):
            data = self._chain.db.commit(number) if kept else None
            if data is not None:
                mine = (m.groups for m in decode(Commit, data).body.members if m.peer == self._shell.participant.me)
                kept.intersection_update(next(mine, ()))
        return sorted(set(groups) - kept)


def _micro(loss: float) -> int:
    """A loss as a header says it: a state that others have spoilt may give any."""
    return round(MICRO * (min(max(loss, 0.0), LOSS_MAX) if math.isfinite(loss) else LOSS_MAX))
