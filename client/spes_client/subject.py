"""What a plan or a measurement is about: a model, its groups, its peers and rounds, from a preset, a file or a run.

A manifest need not be finished for it: only the tables that fix sizes are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_p2p.core import plan
from spes_p2p.core.plan import Files
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_protocols.codec import from_plain
from spes_protocols.errors import SchemaError, UserError
from spes_protocols.manifest import Codecs, Model, Optimizer, Ownership, Phase, Rounds
from spes_protocols.messages import SHARED, group_section
from spes_protocols.types import GROUPS_MAX

if TYPE_CHECKING:
    from spes_protocols.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model cut for a run. `peers` own `ownership.groups` groups together; `total_steps` 0: not said."""

    name: str
    model: Model
    ownership: Ownership
    codecs: Codecs
    phases: tuple[Phase, ...] = ()
    total_steps: int = 0
    peers: int
    shared_quota: int = Rounds.shared_quota
    lag: int = 0

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return self.ownership.groups

    @property
    def owned(self) -> int:
        """How many groups a peer owns where `peers` share them evenly, at most what the run allows."""
        return max(1, min(-(-self.groups // self.peers), self.ownership.per_peer_max))

    @property
    def sequences(self) -> int:
        """A peer's batch in a step of the phase with the largest, in sequences; one where no phase says."""
        return max((phase.batch_sequences for phase in self.phases), default=1)

    def host_bytes(self, owned: int, device: plan.Device, devices: int = 1) -> int:
        """Memory of all the peer's processes in the host, without what a CPU trains on."""
        ahead = self.lag > 0
        return plan.host_bytes(self.model, self.groups, owned, device=device, devices=devices, ahead=ahead)

    @property
    def senders(self) -> int:
        """How many shared sections travel in a round."""
        return min(self.peers, self.shared_quota)

    def share(self) -> dict[str, int]:
        """One peer's part in a round, as `core.plan` takes it."""
        return {"peers": self.peers, "groups": self.groups, "owned": self.owned, "senders": self.senders}

    def files(self) -> Files:
        """Exact sizes of the run's states and blobs; a group counts as large as group 0, as all are alike."""
        from spes_p2p.delta.codecs import section_bytes
        from spes_p2p.store.states import Layout

        specs = tensor_specs(self.model, self.groups)
        return Files(
            state_bytes=Layout.of([(spec.name, spec.shape) for spec in specs]).file_bytes,
            shared_bytes=section_bytes(section_specs(self.model, self.groups, SHARED), self.codecs.shared),
            group_bytes=section_bytes(section_specs(self.model, self.groups, group_section(0)), self.codecs.group),
        )


def subject_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that name a subject; without them it is the run in --dir."""
    ui.flag(parser, "--preset", metavar="NAME", default="", help="a preset's model: tiny, 1b, 2b, 7b or 9b")
    ui.flag(
        parser,
        "--manifest",
        metavar="FILE",
        default="",
        help="a manifest, signed or not, or a run's directory (default: the run in --dir)",
    )
    ui.flag(
        parser,
        "--nodes",
        type=ui.whole_number(1, 100_000),
        metavar="N",
        help="peers in the run (default: as many as the run needs to begin)",
    )
    ui.flag(
        parser,
        "--groups",
        type=ui.whole_number(1, GROUPS_MAX),
        metavar="K",
        env=None,
        help="expert groups in the run (default: the manifest's)",
    )
    ui.dir_flag(parser)


def subject_of(args: argparse.Namespace, *, otherwise: str = "") -> Subject:
    """What the flags name, or the preset `otherwise` where they name nothing and --dir has no run.

    Raises `UserError` for what cannot be read or cut so.
    """
    if args.preset and args.manifest:
        raise UserError("give --preset or --manifest, not both")
    nodes = None if args.nodes is None else int(args.nodes)
    groups = None if args.groups is None else int(args.groups)
    if args.manifest:
        return _recut(_of_file(Path(args.manifest).expanduser()), nodes, groups)
    if args.preset:
        return _recut(of_preset(args.preset, nodes), nodes, groups)
    if otherwise and not any((ui.home(args) / "runs").glob("*/manifest")):
        return _recut(of_preset(otherwise, nodes), nodes, groups)
    return _recut(_of_run(ui.home(args)), nodes, groups)


def of_preset(preset: str, nodes: int | None = None) -> Subject:
    """A preset, cut for `nodes` as far as its experts and its batch can be. Raises `UserError` for an unknown one."""
    from spes_client.presets import new_manifest

    try:
        return _of_plain(new_manifest(preset, nodes=nodes), preset)
    except UserError:
        return _of_plain(new_manifest(preset), preset)


def of_manifest(manifest: Manifest) -> Subject:
    """A run."""
    return Subject(
        name=manifest.name,
        model=manifest.model,
        ownership=manifest.ownership,
        codecs=manifest.codecs,
        phases=manifest.rounds.phases,
        total_steps=manifest.optimizer.total_steps,
        peers=manifest.ownership.min_peers,
        shared_quota=manifest.rounds.shared_quota,
        lag=manifest.rounds.lag,
    )


def _of_run(path: Path) -> Subject:
    from spes_p2p.store.rundir import resolve_run_dir

    try:
        return of_manifest(resolve_run_dir(path).manifest.record)
    except UserError as error:
        raise UserError(f"{error}; or name a model with --preset or --manifest") from None


def _of_file(path: Path) -> Subject:
    if path.is_dir():
        return _of_run(path)
    if path.suffix == ".toml":
        from spes_client.manifest_toml import read

        return _of_plain(read(path), path.stem)
    from spes_client.run_commands import read_signed

    return of_manifest(read_signed(path).record)


def _of_plain(plain: Mapping[str, Any], name: str) -> Subject:
    """From the nested dicts of a manifest that may lack its data. Raises `SchemaError` for a wrong value."""
    for key in ("model", "ownership"):
        if not isinstance(plain.get(key), dict):
            raise SchemaError(key, plain.get(key), "a table, as `spes run new` writes it")
    model = from_plain(Model, plain["model"], "model")
    ownership = from_plain(Ownership, plain["ownership"], "ownership")
    rounds = from_plain(Rounds, plain["rounds"], "rounds") if "rounds" in plain else None
    optimizer = from_plain(Optimizer, plain["optimizer"], "optimizer") if "optimizer" in plain else None
    return Subject(
        name=str(plain.get("name", name)),
        model=model,
        ownership=ownership,
        codecs=from_plain(Codecs, plain.get("codecs", {}), "codecs"),
        phases=rounds.phases if rounds else (),
        total_steps=optimizer.total_steps if optimizer else 0,
        peers=ownership.min_peers,
        shared_quota=rounds.shared_quota if rounds else Rounds.shared_quota,
        lag=rounds.lag if rounds else 0,
    )


def _recut(subject: Subject, nodes: int | None, groups: int | None) -> Subject:
    """The same with other numbers of peers and groups. Raises `UserError` where the experts cannot be divided so."""
    count = groups or subject.groups
    if subject.model.num_experts % count:
        experts = subject.model.num_experts
        fitting = [str(k) for k in range(1, experts + 1) if experts % k == 0]
        raise UserError(f"{experts} experts cannot be divided into {count} groups; use one of {', '.join(fitting)}")
    peers = nodes or subject.peers
    ownership = subject.ownership
    if groups is not None or nodes is not None:
        most = 0 if groups is not None else ownership.groups_per_peer_max  # of other groups the run says nothing
        ownership = Ownership(groups=count, min_peers=min(peers, count), groups_per_peer_max=most)
    return replace(subject, ownership=ownership, peers=peers)
