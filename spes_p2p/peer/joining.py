"""From a pasted address to a pinned run on disk (SPEC 8.1): the one moment when a person decides whom to trust.

After this everything is checked against the manifest, so it no longer matters which peer is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.net import timeouts
from spes_p2p.net.addresses import parse_address
from spes_p2p.net.transport import Transport
from spes_p2p.store.first_state import adopt_state, beside
from spes_p2p.store.rundir import RunDir, pin_run, pinned_run
from spes_protocols.codec import digest
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Signed
from spes_protocols.requests import MANIFEST

CALL_SECONDS = timeouts.CALL


def expected_run(addresses: Sequence[str]) -> bytes | None:
    """The run id that pasted addresses carry after `#`. Raises `UserError` if they name different runs."""
    named = {run_id for text in addresses if (run_id := parse_address(text)[2]) is not None}
    if len(named) > 1:
        raise UserError("the addresses given with --peer name different runs; use addresses of one run")
    return next(iter(named), None)


async def connect_any(transport: Transport, addresses: Sequence[str]) -> list[str]:
    """Connect to every address, all at once: one that is silent keeps nobody waiting for another.

    Returns the peers reached, in the order of their addresses. Raises `NetworkError` if none could be.
    """
    tries = [transport.connect(address) for address in [parse_address(text)[0] for text in addresses]]
    reached, problems = [], []
    for result in await asyncio.gather(*tries, return_exceptions=True):
        if isinstance(result, str):
            reached.append(result)
        elif isinstance(result, NetworkError):
            problems.append(str(result))
        else:
            raise result
    if not reached:
        raise NetworkError("; ".join(problems))
    return reached


async def fetch_manifest(transport: Transport, peers: Sequence[str], wanted: bytes | None) -> Signed[Manifest]:
    """The run's manifest from the first peer that has one. Raises `NetworkError`, or `UserError` for the wrong run."""
    problems = []
    for peer in peers:
        try:
            raw = await transport.call(peer, MANIFEST, b"", timeout_seconds=CALL_SECONDS)
            manifest = unseal_manifest(raw, peer=peer)
        except (NetworkError, RemoteError) as error:
            problems.append(str(error))
            continue
        run_id = run_id_of(manifest)
        if wanted is not None and run_id != wanted:
            raise UserError(
                f"{peer} is in run {run_id.hex()[:16]}, not in {wanted.hex()[:16]} that you asked for: "
                "check the address, or leave out its #... part to join the run it is in"
            )
        return manifest
    raise NetworkError(f"no peer gave a manifest: {'; '.join(problems)}")


def open_pinned(home: Path, manifest: Signed[Manifest]) -> RunDir:
    """Pin the run of this home on first use and make its directory. Raises `UserError` if the home follows another."""
    pin_run(home, run_id_of(manifest))
    return RunDir.create(home, manifest.raw)


def open_known(home: Path, wanted: bytes | None) -> RunDir | None:
    """The pinned run's directory from an earlier join, None if this home has none yet."""
    run_id = pinned_run(home)
    if run_id is None or not (home / "runs" / run_id.hex() / "manifest").exists():
        return None
    if wanted is not None and wanted != run_id:
        raise UserError(
            f"{home} follows run {run_id.hex()[:16]}, the address names {wanted.hex()[:16]}: give another --dir for it"
        )
    return RunDir.open(home / "runs" / run_id.hex())


def run_id_of(manifest: Signed[Manifest]) -> bytes:
    """The run id: the digest of the canonical manifest."""
    return digest(manifest.record)


def give_first_state(
    run_dir: RunDir, manifest_path: Path | None, genesis_path: Path | None, say: Callable[[str], None]
) -> None:
    """Put the organizer's file with S_0 into the run's states, for others to fetch (SPEC 6.7).

    `genesis_path` None: the file beside the manifest, if there is one. Raises `UserError` if it is another state.
    """
    record = run_dir.manifest.record
    if record.genesis == "seed":
        if genesis_path is not None:
            raise UserError("this run's first state follows from its seed: leave out --genesis")
        return
    states = run_dir.states()
    if 0 in states.rounds() and states.root(0) == record.genesis_root:
        return
    if genesis_path is None:
        if manifest_path is None or not beside(manifest_path).exists():
            return  # others have it
        genesis_path = beside(manifest_path)
    say(f"reading the first state from {genesis_path}")
    adopt_state(states, run_dir.specs(), genesis_path, record.genesis_root)


def introduction(manifest: Signed[Manifest]) -> str:
    """What a volunteer is shown before anything is trained: whose run this is."""
    record = manifest.record
    return f"run {record.name!r}  id {run_id_of(manifest).hex()[:16]}  organizer {manifest.signer}"
