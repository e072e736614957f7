"""One directory per run, under a home with the peer's identity: where everything lies, and who may write there.

home/identity, home/pin
home/runs/<run id>/manifest, ledger.sqlite, blobs/, snapshots/, optim/, out/, cache/, control.addr, log, lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.files import atomic_write, disk_errors, make_directory, remove_unfinished
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.states import Specs, StateStore
from spes_p2p.store.versions import OtherVersionError, other_version
from spes_protocols.codec import digest
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Signed
from spes_protocols.types import ENVELOPE_BYTES_MAX

_MANIFEST = "manifest"
EVENTS = "events.jsonl"
"""The event log in a run's directory."""

_NAME_SECONDS = 1.0
_POLL_SECONDS = 0.02
"""How long, and how often, a lock that is taken is asked who has it."""

_DIRECTORIES = ("blobs", "snapshots", "optim", "out", "cache")


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """A run's directory, whose manifest was checked when it was opened."""

    path: Path
    manifest: Signed[Manifest]

    @classmethod
    def create(cls, home: Path, signed_manifest: bytes) -> RunDir:
        """The directory of a run under `home`, made if missing; a manifest that is there stays.

        Raises `RemoteError` for a bad manifest, `UserError` if the disk does not take it.
        """
        manifest = unseal_manifest(signed_manifest)
        path = home / "runs" / digest(manifest.record).hex()
        for name in _DIRECTORIES:
            make_directory(path / name)
        if not (path / _MANIFEST).exists():
            atomic_write(path / _MANIFEST, signed_manifest)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open a run's directory.

        Raises `UserError` if it is none (`OtherVersionError`: of another version of this program), `IntegrityError` if
        its manifest is damaged.
        """
        file_path = path / _MANIFEST
        try:
            with file_path.open("rb") as file:
                data = file.read(ENVELOPE_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} is not a run directory: it has no file `{_MANIFEST}`") from None
        except IsADirectoryError:
            raise IntegrityError("manifest", str(file_path), "it is a directory") from None
        except OSError as error:
            raise UserError(f"cannot read {file_path}: {error.strerror}; check whose it is, and its rights") from None
        try:
            manifest = unseal_manifest(data)
        except RemoteError as error:
            if (which := other_version(data)) is not None:
                raise OtherVersionError(file_path, which) from None
            raise IntegrityError(error.check, str(file_path), error.detail) from None
        return cls(path=path, manifest=manifest)

    @property
    def run_id(self) -> bytes:
        """Digest of the manifest."""
        return digest(self.manifest.record)

    @property
    def manifest_path(self) -> Path:
        """The manifest's envelope."""
        return self.path / _MANIFEST

    @property
    def ledger_path(self) -> Path:
        """The ledger's database."""
        return self.path / "ledger.sqlite"

    @property
    def blobs_dir(self) -> Path:
        """Blobs by digest."""
        return self.path / "blobs"

    @property
    def snapshots_dir(self) -> Path:
        """Global states."""
        return self.path / "snapshots"

    @property
    def optim_dir(self) -> Path:
        """The trainer's moments, exact weights and residuals."""
        return self.path / "optim"

    @property
    def out_dir(self) -> Path:
        """Fresh blobs of the trainer, before they are stored by digest."""
        return self.path / "out"

    @property
    def cache_dir(self) -> Path:
        """Downloaded and tokenized data."""
        return self.path / "cache"

    @property
    def control_address_path(self) -> Path:
        """Text file with the path of the control socket."""
        return self.path / "control.addr"

    @property
    def log_path(self) -> Path:
        """The peer's log."""
        return self.path / "log"

    @property
    def events_path(self) -> Path:
        """What happened, for when something went wrong."""
        return self.path / EVENTS

    @property
    def silent_path(self) -> Path:
        """There when own votes may have been lost: the next start says nothing until rounds have closed (SPEC 5.6)."""
        return self.path / "silent"

    def ledger(self) -> LedgerDB:
        """Open the ledger, empty if it is new. Raises `UserError` if the disk does not take it.

        An empty one where this peer has taken part already is not new: what it held is lost, own votes too.
        """
        db = LedgerDB(self.ledger_path)
        try:
            if db.is_blank and self.has_taken_part:
                atomic_write(self.silent_path, b"the ledger's database was gone\n")
        except BaseException:
            db.close()
            raise
        return db

    @property
    def has_taken_part(self) -> bool:
        """Whether blobs or states are here that only a peer with a ledger can have."""
        states = (path.name for path in self.snapshots_dir.glob("*.index"))
        return any(name != "0.index" for name in states) or any(self.blobs_dir.glob("*"))

    def blobs(self) -> BlobStore:
        """The store of blobs."""
        return BlobStore(self.blobs_dir)

    def specs(self) -> Specs:
        """Name and shape of every tensor of the manifest's model."""
        manifest = self.manifest.record
        return [(spec.name, spec.shape) for spec in tensor_specs(manifest.model, manifest.ownership.groups)]

    def states(self) -> StateStore:
        """The store of global states, for the manifest's model."""
        return StateStore(self.snapshots_dir, self.specs())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process alone; what a killed holder left unfinished is cleared away.

        Raises `UserError` naming the process that holds it. The kernel frees the lock however the holder ends.
        """
        with hold(self.path):
            for directory in (self.path, self.blobs_dir, self.snapshots_dir):
                remove_unfinished(directory)
            yield


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold a directory, a run's or a home with its identity, for this process alone.

    Raises `UserError` naming the process that holds it. The kernel frees the lock however the holder ends.
    """
    path = directory / "lock"
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + _NAME_SECONDS
        while not _try_lock(descriptor):
            holder = _holder(descriptor)
            if holder or time.monotonic() > deadline:
                raise UserError(
                    f"{directory} is in use by pid {holder or 'unknown'}: end that process first (`spes leave` ends a "
                    "volunteer), or give another --dir"
                )
            time.sleep(_POLL_SECONDS)  # its holder has not written its number yet, or is just ending
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int:
    """The process that wrote its number into a lock file, 0 if there is none or it lives no more."""
    text = os.pread(descriptor, 20, 0)
    pid = int(text) if text.strip().isdigit() else 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:  # somebody else's
        pass
    return pid


def pinned_run(home: Path) -> bytes | None:
    """The run id that this home follows, None before the first join. Raises `IntegrityError` for a damaged pin."""
    path = home / "pin"
    try:
        text = path.read_text("ascii").strip()
        run_id = bytes.fromhex(text)
    except FileNotFoundError:
        return None
    except (ValueError, IsADirectoryError):
        run_id = b""
    if len(run_id) != 32:
        raise IntegrityError(
            "decode", str(path), "expected a run id, 64 hexadecimal digits; remove the file to pin anew"
        )
    return run_id


def pin_run(home: Path, run_id: bytes) -> None:
    """Pin a run on first use. Raises `UserError` if this home follows another one."""
    pinned = pinned_run(home)
    if pinned is None:
        make_directory(home)
        atomic_write(home / "pin", f"{run_id.hex()}\n".encode())
    elif pinned != run_id:
        raise UserError(
            f"{home} follows run {pinned.hex()[:16]}, not {run_id.hex()[:16]}: give another --dir for this run, "
            f"or remove {home / 'pin'} if the change is meant"
        )


def resolve_run_dir(path: Path) -> RunDir:
    """The run at `path`: a run directory, or a home with one run (of several, the pinned one).

    Raises `UserError` if there is none or the choice is not clear.
    """
    if (path / _MANIFEST).exists():
        return RunDir.open(path)
    found = sorted(manifest.parent for manifest in path.glob(f"runs/*/{_MANIFEST}"))
    if not found:
        if any((run / "ledger.sqlite").exists() for run in (path, *path.glob("runs/*"))):
            raise UserError(f"the run at {path} has no manifest; see what can be done: spes repair --dir {path}")
        raise UserError(f"no run at {path}: give a run's directory, or the --dir that spes-join or spes-bootstrap has")
    if len(found) > 1:
        pinned = pinned_run(path)
        found = [run for run in found if pinned and run.name == pinned.hex()] or found
    if len(found) > 1:
        raise UserError(f"{path} holds {len(found)} runs: name one of them, such as {found[0]}")
    return RunDir.open(found[0])
