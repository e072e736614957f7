"""`spes export`, `spes-replay export`: a state of a log, or of a file, as a checkpoint that `transformers` loads."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from spes_p2p.core.roots import state_root
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.data.batches import TokenData
from spes_p2p.data.sources import file_digest
from spes_p2p.model.export import export_checkpoint
from spes_p2p.replay.log import Report
from spes_p2p.replay.states import state_at
from spes_p2p.store.first_state import state_index
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.states import map_state
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest

CACHE_BYTES_MAX = 20 * 2**30


def token_data(run: RunDir, allow_sources: Sequence[str], report: Report) -> TokenData:
    """The run's data, fetched into its cache as it is needed. Raises `UserError` for what may not be read."""
    return _token_data(run.manifest.record, run.cache_dir, allow_sources, report)


def _token_data(manifest: Manifest, cache_dir: Path, allow_sources: Sequence[str], report: Report) -> TokenData:
    return TokenData(
        manifest.data,
        manifest.model.sequence_length,
        manifest.seed,
        cache_dir,
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
    _require_new(out_dir)
    record = run.manifest.record
    with (
        _tokenizer(record, run.cache_dir, tokenizer, allow_sources, report) as path,
        state_at(run, round_number, work=work, threads=threads, report=report) as (number, states, root),
    ):
        state = states.get(root)
        assert state is not None
        report(f"writing {out_dir}", -1.0)
        export_checkpoint(state, record.model, record.data.tokenizer.eos_id, path, out_dir)
        return number, root


def export_file(
    state_path: Path,
    manifest: Manifest,
    out_dir: Path,
    *,
    tokenizer: Path | None,
    allow_sources: Sequence[str],
    report: Report,
) -> bytes:
    """Write the state of a file, such as a run's first one, into `out_dir`; returns its root, compared with nothing.

    The tokenizer is the file given, or is fetched from the manifest's address. Raises `UserError` if the file is no
    state of the manifest's model, the tokenizer is another one, or `out_dir` is in use.
    """
    _require_new(out_dir)
    specs = [(spec.name, spec.shape) for spec in tensor_specs(manifest.model, manifest.ownership.groups)]
    root = state_root(state_index(state_path, specs, lambda share: report(f"reading {state_path}", share)))
    with (
        tempfile.TemporaryDirectory(prefix="spes-export-") as folder,
        _tokenizer(manifest, Path(folder), tokenizer, allow_sources, report) as path,
    ):
        report(f"writing {out_dir}", -1.0)
        state = map_state(state_path, specs)
        export_checkpoint(state, manifest.model, manifest.data.tokenizer.eos_id, path, out_dir)
    return root


def _require_new(out_dir: Path) -> None:
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists and is not an empty directory; name another one")


@contextlib.contextmanager
def _tokenizer(
    manifest: Manifest, cache_dir: Path, given: Path | None, allow_sources: Sequence[str], report: Report
) -> Iterator[Path]:
    """The manifest's tokenizer: the file given, the one in the cache, or fetched into it; its digest is compared."""
    wanted = manifest.data.tokenizer.sha256
    path = given or cache_dir / f"{wanted}.json"
    with contextlib.ExitStack() as stack:
        if not path.exists() and given is None:
            try:
                data = _token_data(manifest, cache_dir, allow_sources, report)
                stack.callback(data.close)
                path = data.tokenizer_path()
            except UserError as error:
                raise UserError(f"the tokenizer is not at hand ({error}); give it with --tokenizer FILE") from None
        found = _digest_of(path)
        if found != wanted:
            raise UserError(
                f"{path} has SHA-256 {found[:16]}, the run's tokenizer {wanted[:16]}: give that one with "
                "--tokenizer FILE"
            )
        yield path


def _digest_of(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from None
