"""The blobs of a round against what its commit says of them: digests, ladder, norms, refusals (SPEC 7.2 to 7.4).

Judges by the rules of `core.rounds`, where a member decides whether to vote for a set; but it says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.ladder import checked_by_blob, norm_offenders
from spes_p2p.delta.contributions import check_blobs
from spes_p2p.replay.problems import Problem
from spes_p2p.store.chain import Step
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import IntegrityError
from spes_protocols.messages import Header, Section, Signed


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the blobs of one contribution are.

    `missing` are those that are not in the log, `broken` those that are not what their header says. Without either
    `check` is the step of the ladder that `failed` fails, None if all pass, and `norms` their squared norms.
    """

    claimed: str | None
    header: Signed[Header]
    missing: tuple[Section, ...] = ()
    broken: Problem | None = None
    check: str | None = None
    failed: Section | None = None
    norms: tuple[tuple[str, float], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether all the blobs could be looked at."""
        return not self.missing and self.broken is None


class BlobJudge:
    """Looks at the blobs of commits, several contributions at a time."""

    def __init__(self, run: RunDir, threads: int) -> None:
        self._manifest = run.manifest.record
        self._ledger = run.ledger_path
        self._blobs = run.blobs()
        self._pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def look(self, step: Step) -> list[Look]:
        """Hash and decode the blobs of a commit: those that count, and those refused for what is in them."""
        assert step.value is not None
        pairs = checked_by_blob(step.value)
        return list(self._pool.map(lambda pair: self._look(step.before.round, *pair), pairs))

    def _look(self, round_number: int, claimed: str | None, header: Signed[Header]) -> Look:
        sections = header.record.sections
        missing = tuple(section for section in sections if not self._blobs.has(section.blob))
        broken = (self._broken(round_number, header, section) for section in sections if section not in missing)
        first = next((problem for problem in broken if problem is not None), None)
        if missing or first is not None:
            return Look(claimed=claimed, header=header, missing=missing, broken=first)
        norms: list[tuple[str, float]] = []
        for section in sections:
            verdict = check_blobs(self._manifest, header.signer, [section], self._blobs.path)
            if verdict.check is not None:
                return Look(claimed=claimed, header=header, check=verdict.check, failed=section)
            norms += verdict.norms
        return Look(claimed=claimed, header=header, norms=tuple(norms))

    def _broken(self, round_number: int, header: Signed[Header], section: Section) -> Problem | None:
        file = self._blobs.path(section.blob)
        try:
            self._blobs.verify(section.blob)
        except IntegrityError as error:
            check, detail = error.check, error.detail
        else:
            size = self._blobs.size(section.blob)
            if size == section.size:
                return None
            check, detail = "size", f"{size} bytes, its header says {section.size}"
        detail = f"{section.name}: {detail}"
        return Problem(round=round_number, file=file, check=check, detail=detail, peer=header.signer)

    def problems(self, step: Step, looks: list[Look]) -> Iterator[Problem]:
        """What is wrong with the blobs that are there, and with the verdicts that the commit gives on them."""
        number = step.before.round
        for look in looks:
            if look.broken is not None:
                yield look.broken
            elif look.claimed is None and look.failed is not None:
                file, detail = self._blobs.path(look.failed.blob), f"{look.failed.name} counted, but must be refused"
                yield self._problem(number, look, str(look.check), detail, file)
            elif look.is_known and look.claimed not in (None, "norm") and look.check != look.claimed:
                detail = f"refused for {look.claimed}, but it fails {look.check or 'no check'}"
                yield self._problem(number, look, "refusal", detail)
            elif look.claimed == "norm" and look.check is not None:
                yield self._problem(number, look, "refusal", f"refused for norm, but it fails {look.check}")
        yield from self._norm_problems(step, [look for look in looks if look.claimed in (None, "norm")])

    def norms_known(self, looks: list[Look]) -> bool:
        """Whether the norms of a set can be compared: each contribution that has a say in them is known."""
        return all(look.is_known and look.check is None for look in looks if look.claimed in (None, "norm"))

    def _norm_problems(self, step: Step, looks: list[Look]) -> Iterator[Problem]:
        if not self.norms_known(looks):
            return
        norms = {look.header.signer: dict(look.norms) for look in looks}
        limit = self._manifest.rounds.norm_limit
        offenders = norm_offenders(norms, step.before.electorate.weights, limit)
        for look in looks:
            if (look.header.signer in offenders) == (look.claimed == "norm"):
                continue
            if look.claimed is None:
                detail = f"counted, but a norm is above {limit:g} times the median of the set"
                yield self._problem(step.before.round, look, "norm", detail)
            else:
                detail = f"refused for norm, but its norms are within {limit:g} times the median of the set"
                yield self._problem(step.before.round, look, "refusal", detail)

    def _problem(self, round_number: int, look: Look, check: str, detail: str, file: Path | None = None) -> Problem:
        peer = look.header.signer
        return Problem(round=round_number, file=file or self._ledger, check=check, detail=detail, peer=peer)
