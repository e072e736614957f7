"""`spes-replay export`: a global state of the log as a checkpoint that `transformers` loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spes_p2p.data.batches import TokenData
from spes_p2p.data.sources import file_digest
from spes_p2p.model.export import export_checkpoint
from spes_p2p.replay.log import Report
from spes_p2p.replay.states import state_at
from spes_p2p.store.rundir import RunDir
from spes_protocols.errors import UserError

CACHE_BYTES_MAX = 20 * 2**30


def token_data(run: RunDir, allow_sources: Sequence[str], report: Report) -> TokenData:
    """The run's data, fetched into its cache as it is needed. Raises `UserError` for what may not be read."""
    manifest = run.manifest.record
    return TokenData(
        manifest.data,
        manifest.model.sequence_length,
        manifest.seed,
        run.cache_dir,
        allow_sources,
        cache_bytes_max=CACHE_BYTES_MAX,
        report=report,
    )


def export(
    run: RunDir,
    round_number: int | None,
    out_dir: Path,
    *,
    tokenizer: Path | None,
    allow_sources: Sequence[str],
    work: Path | None,
    threads: int,
    report: Report,
) -> tuple[int, bytes]:
    """Write S_N into `out_dir`; returns N (the head's round for None) and the state root.

    The tokenizer is the file given, the one in the run's cache, or is fetched from the manifest's address. Raises
    `UserError` if it is another one or `out_dir` is in use, `IntegrityError` if the log does not give the state.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists and is not an empty directory; name another one")
    record = run.manifest.record
    path = tokenizer or _cached_tokenizer(run, allow_sources, report)
    found = _digest_of(path)
    if found != record.data.tokenizer.sha256:
        raise UserError(
            f"{path} has SHA-256 {found[:16]}, the run's tokenizer {record.data.tokenizer.sha256[:16]}: "
            "give that one with --tokenizer FILE"
        )
    with state_at(run, round_number, work=work, threads=threads, report=report) as (number, states, root):
        state = states.get(root)
        assert state is not None
        report(f"writing {out_dir}", -1.0)
        export_checkpoint(state, record.model, record.data.tokenizer.eos_id, path, out_dir)
        return number, root


def _cached_tokenizer(run: RunDir, allow_sources: Sequence[str], report: Report) -> Path:
    cached = run.cache_dir / f"{run.manifest.record.data.tokenizer.sha256}.json"
    if cached.exists():
        return cached
    try:
        return token_data(run, allow_sources, report).tokenizer_path()
    except UserError as error:
        raise UserError(f"the tokenizer is not in the run's cache ({error}); give it with --tokenizer FILE") from None


def _digest_of(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from None
