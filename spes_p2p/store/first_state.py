"""A run's first state as a file: made by the organizer, signed for by its root, served by whoever has it (SPEC 6.7).

tensors --write_state--> run.genesis.safetensors --state_index--> genesis_root of the manifest
                                                 --adopt_state--> snapshot 0 of a peer's state store
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from spes_p2p.core.roots import leaf_digest, state_root
from spes_p2p.store.files import copy_synced, disk_errors, rename_synced, require_space
from spes_p2p.store.states import FloatArray, Layout, Specs, StateStore
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.messages import SnapshotIndex, TensorIndex

SUFFIX = ".genesis.safetensors"
"""The file of `run.toml`, and of `run.spes` that is signed from it, is `run.genesis.safetensors` beside them."""

Report = Callable[[float], None]
"""Receives the share done, 0 to 1."""


def beside(manifest_path: Path) -> Path:
    """Where the first state of a manifest lies by default."""
    return manifest_path.with_suffix(SUFFIX)


def write_state(path: Path, specs: Specs, tensors: Iterable[tuple[str, FloatArray]]) -> bytes:
    """Write fp32 tensors, in ascending order of name, as the state file `path`; returns the state root.

    The file is whole or not there; one that was there is replaced. Raises `UserError` when the disk does not take it,
    and what the iterator raises.
    """
    try:
        with disk_errors(path), tempfile.TemporaryDirectory(prefix=".genesis-", dir=path.parent) as folder:
            store = StateStore(Path(folder), specs)
            with store.writer(0) as writer:
                for name, array in tensors:
                    writer.add(name, array)
                index = writer.commit()
            rename_synced(store.path(0), path)
    except FileNotFoundError:
        raise UserError(f"no directory {path.parent} for {path.name}") from None
    return state_root(index)


def state_index(path: Path, specs: Specs, report: Report = lambda share: None) -> SnapshotIndex:
    """Hash a state file of these tensors: its index as snapshot 0. Raises `UserError` if it is not such a file."""
    layout = Layout.of(specs)
    try:
        mapped = layout.map(path)
    except OSError as error:
        raise UserError(f"cannot read the first state {path}: {error.strerror}") from None
    except IntegrityError as error:
        raise UserError(f"{path} is not a state of this manifest's model: {error.detail}") from None
    done = len(layout.header)
    leaves: list[list[bytes]] = []
    for tensor, leaf in layout.leaves():
        offset, size = layout.tensors[tensor].leaf(leaf)
        if leaf == 0:
            leaves.append([])
        leaves[-1].append(leaf_digest(mapped[offset : offset + size].data))
        done += size
        report(done / layout.file_bytes)
    tensors = (
        TensorIndex(name=extent.name, shape=extent.shape, leaves=tuple(digests))
        for extent, digests in zip(layout.tensors, leaves, strict=True)
    )
    return SnapshotIndex(round=0, tensors=tuple(tensors))


def adopt_state(store: StateStore, specs: Specs, path: Path, root: bytes, report: Report = lambda share: None) -> None:
    """Make a state file snapshot 0 of a store, after its root was compared.

    The file is linked where the disk allows that, else copied; either way it may be removed afterwards. Raises
    `UserError` if it is not the state with this root, or the disk does not take it.
    """
    index = state_index(path, specs, report)
    found = state_root(index)
    if found != root:
        raise UserError(
            f"{path} has root {found.hex()[:16]}, the manifest's first state is {root.hex()[:16]}: give the file that "
            "`spes run sign` read with --genesis FILE"
        )
    store.remove(0)
    target = store.path(0)
    try:
        os.link(path, target)
    except OSError:  # another disk, or one that knows no links
        require_space(target.parent, store.layout.file_bytes)
        copy_synced(path, target)
    store.put_index(index)
