"""`spes-replay what-if`: one round of the log applied again with a change, and what that does to the held-out loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.head import Head
from spes_p2p.data.tokenizing import Tokens
from spes_p2p.delta.contributions import Contribution, contributions
from spes_p2p.delta.merging import merge_alpha
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.replay.export import token_data
from spes_p2p.replay.log import Log, Report, open_ledger
from spes_p2p.replay.states import Recomputed, root_detail, state_at
from spes_p2p.store.chain import Step
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Result:
    """A state after the round: who counted, the strength of the merge (None: the round has none), held-out loss."""

    peers: tuple[str, ...]
    merge_alpha: float | None
    state_root: bytes
    bits_per_byte: float


def what_if(
    run: RunDir,
    round_number: int,
    *,
    without: str | None,
    alpha: float | None,
    allow_sources: Sequence[str],
    work: Path | None,
    threads: int,
    report: Report,
) -> tuple[Result, Result]:
    """(what the ledger says, what would have been) of round `round_number`, which goes from S_N to S_{N+1}.

    `without` leaves out the contribution of a peer, named by its id or a unique end of it; `alpha` stands in the place
    of the manifest's `merging.alpha`. Raises `UserError` where the change would change nothing or data is not to be
    had, `IntegrityError` if the log does not give the state.
    """
    manifest = run.manifest.record
    step = _commit(run, round_number)
    assert step.value is not None
    counted = contributions(step.before, step.value)
    changed = counted if without is None else _left(counted, without, round_number)
    other = manifest if alpha is None else _with_alpha(manifest, step.before, alpha)
    blobs = run.blobs()
    for section in (section for contribution in counted for section in contribution.sections):
        blobs.verify(section.blob)
    tokens = token_data(run, allow_sources, report).heldout()
    with state_at(run, round_number, work=work, threads=threads, report=report) as (_, states, _):

        def result(of: Manifest, given: Sequence[Contribution], what: str) -> Result:
            report(f"applying round {round_number} {what}", -1.0)
            root = states.apply(step.before, given, manifest=of)
            loss = _measure(of, states, root, tokens, threads, lambda share: report(f"measuring it {what}", share))
            phase = of.phase(step.before.step)
            strength = merge_alpha(of.merging, step.before.step, phase.steps)
            peers = tuple(contribution.peer for contribution in given)
            return Result(peers=peers, merge_alpha=strength, state_root=root, bits_per_byte=loss)

        actual = result(manifest, counted, "as it was")
        if actual.state_root != step.after.state_root:
            where = f"round {round_number} of {run.ledger_path}"
            raise IntegrityError("state_root", where, root_detail(step.after.state_root, actual.state_root))
        return actual, result(other, changed, "with the change")


def _measure(
    manifest: Manifest,
    states: Recomputed,
    root: bytes,
    tokens: Tokens,
    threads: int,
    report: Callable[[float], None],
) -> float:
    state = states.get(root)
    assert state is not None
    groups, heldout_bytes = manifest.ownership.groups, manifest.data.heldout_bytes
    return bits_per_byte(state, manifest.model, groups, tokens, heldout_bytes, threads=threads, report=report)


def _commit(run: RunDir, round_number: int) -> Step:
    with open_ledger(run) as db:
        log = Log(run.manifest.record, run.run_id, db)
        step = next(log.commits(round_number, round_number + 1), None)
    if step is None:
        raise UserError(f"the ledger has no commit of round {round_number}; see its rounds with: spes-replay show DIR")
    return step


def _left(counted: Sequence[Contribution], without: str, round_number: int) -> tuple[Contribution, ...]:
    """The contributions of all others."""
    end = without.lstrip("…")
    named = [contribution.peer for contribution in counted if end and contribution.peer.endswith(end)]
    if len(named) != 1:
        peers = ", ".join(contribution.peer for contribution in counted) or "nobody"
        what = f"{len(named)} peers" if named else "no peer"
        raise UserError(f"--without {without} names {what} of those that counted in round {round_number}: {peers}")
    return tuple(contribution for contribution in counted if contribution.peer != named[0])


def _with_alpha(manifest: Manifest, before: Head, alpha: float) -> Manifest:
    merging = manifest.merging
    steps = manifest.phase(before.step).steps
    if merge_alpha(dataclasses.replace(merging, alpha=1.0), before.step, steps) is None:
        raise UserError(
            f"round {before.round} (schedule steps {before.step} to {before.step + steps - 1}) merges no experts, so "
            f"--alpha changes nothing there: merging.interval is {merging.interval}, until_step {merging.until_step}"
        )
    return dataclasses.replace(manifest, merging=dataclasses.replace(merging, alpha=alpha))
