"""`spes-replay fetch`, the part without a network: what a log should have, and which of it is there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from spes_p2p.core.ladder import checked_by_blob
from spes_p2p.replay.log import Log
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Chain
from spes_p2p.store.states import StateStore
from spes_protocols.errors import IntegrityError
from spes_protocols.messages import Section


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A blob that some commit rests on: its round and whose it is. `refused` blobs serve to check a refusal only."""

    round: int
    sender: str
    section: Section
    refused: bool


def wanted_blobs(log: Log) -> list[Wanted]:
    """Every blob that the ledger names, once, in the order of its rounds. Raises `IntegrityError` as `Log.walk`."""
    wanted: dict[bytes, Wanted] = {}
    for step in log.walk():
        if step.value is None:
            continue
        for claimed, header in checked_by_blob(step.value):
            for section in header.record.sections:
                item = Wanted(
                    round=step.before.round, sender=header.signer, section=section, refused=claimed is not None
                )
                wanted.setdefault(section.blob, item)
    return list(wanted.values())


def missing_blobs(wanted: list[Wanted], blobs: BlobStore) -> list[Wanted]:
    """Those that the log lacks; a blob that is there counts, `spes-replay verify` will say if it is wrong."""
    return [item for item in wanted if not blobs.has(item.section.blob)]


def other_states(chain: Chain, states: StateStore, *, rolled_back: bool) -> list[int]:
    """Rounds of the stored states that belong to a branch that was taken back.

    Those beyond the head do only if the ledger was `rolled_back`: else it may not have been read to its end. Damaged
    ones are left to `spes-replay verify`.
    """
    others = []
    for number in states.rounds():
        newest = chain.head.round if rolled_back else number
        with contextlib.suppress(IntegrityError):
            if states.is_other(number, chain.root_at(number), newest=newest):
                others.append(number)
    return others


def first_whole_round(wanted: list[Wanted], blobs: BlobStore) -> int:
    """The round from which on no counted blob is missing: a snapshot of it or a later one makes the log verifiable."""
    return max((item.round + 1 for item in missing_blobs(wanted, blobs) if not item.refused), default=0)
