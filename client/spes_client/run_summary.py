"""What a signed manifest amounts to: who signed it, how large the model is, what a round costs in bytes.

`spes run sign` and `spes run show` print it; nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spes_client.ui import bytes_text, count_text, fingerprint
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.delta.codecs import section_bytes
from spes_protocols.codec import digest, to_plain
from spes_protocols.manifest import Manifest, Source
from spes_protocols.messages import SHARED, Signed, group_section


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of the model, and bytes of a round in the manifest's codecs and in fp32."""

    parameters: int
    parameters_active: int
    parameters_shared: int
    parameters_group: int
    groups_per_peer: int
    shared_bytes: int
    group_bytes: int
    contribution_bytes: int
    """What an owner of `groups_per_peer` groups publishes in a round."""
    contribution_bytes_fp32: int
    round_bytes: int
    """All contributions of a round of `min_peers` owners: every shared section that counts, every group once."""
    round_bytes_fp32: int

    @classmethod
    def of(cls, manifest: Manifest) -> Sizes:
        """The sizes that follow from a manifest; a group counts as large as group 0, as all are alike."""
        model, groups = manifest.model, manifest.ownership.groups
        shared = section_specs(model, groups, SHARED)
        group = section_specs(model, groups, group_section(0))
        in_shared, in_group = (sum(spec.size for spec in specs) for specs in (shared, group))
        parameters = sum(spec.size for spec in tensor_specs(model, groups))
        experts = model.num_experts_per_tok * model.num_hidden_layers * 3 * model.hidden_size * model.intermediate_size
        shared_bytes = section_bytes(shared, manifest.codecs.shared)
        group_bytes = section_bytes(group, manifest.codecs.group)
        owned = manifest.ownership.per_peer_max
        senders = min(manifest.ownership.min_peers, manifest.rounds.shared_quota)
        return cls(
            parameters=parameters,
            parameters_active=in_shared + experts,
            parameters_shared=in_shared,
            parameters_group=in_group,
            groups_per_peer=owned,
            shared_bytes=shared_bytes,
            group_bytes=group_bytes,
            contribution_bytes=shared_bytes + owned * group_bytes,
            contribution_bytes_fp32=4 * (in_shared + owned * in_group),
            round_bytes=senders * shared_bytes + groups * group_bytes,
            round_bytes_fp32=4 * (senders * in_shared + groups * in_group),
        )


def run_json(signed: Signed[Manifest]) -> dict[str, Any]:
    """A signed manifest for scripts: run id, organizer, sizes and every setting."""
    manifest = signed.record
    return {
        "run_id": digest(manifest),
        "name": manifest.name,
        "organizer": signed.signer,
        "fingerprint": fingerprint(signed.signer),
        "sizes": to_plain(Sizes.of(manifest)),
        "manifest": to_plain(manifest),
    }


def identity_rows(signed: Signed[Manifest]) -> list[tuple[str, str]]:
    """Name, run id and organizer, as volunteers will see them."""
    return [
        ("name", signed.record.name),
        ("run id", digest(signed.record).hex()),
        ("organizer", signed.signer),
        ("fingerprint", fingerprint(signed.signer)),
    ]


def size_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Parameters and bytes for people."""
    sizes = Sizes.of(manifest)
    groups = manifest.ownership.groups
    owned = f"{sizes.groups_per_peer} group{'' if sizes.groups_per_peer == 1 else 's'}"
    shared = count_text(sizes.parameters_shared)
    peers = manifest.ownership.min_peers
    drawn = min(1.0, manifest.rounds.shared_quota / peers)  # how often a peer's own shared section is in the round
    own = round(drawn * sizes.shared_bytes) + sizes.groups_per_peer * sizes.group_bytes
    fetched = sizes.round_bytes - own
    own_in_fp32 = 4 * (drawn * sizes.parameters_shared + sizes.groups_per_peer * sizes.parameters_group)
    fetched_fp32 = sizes.round_bytes_fp32 - own_in_fp32
    ratio = fetched_fp32 / fetched if fetched else 1.0
    return [
        ("parameters", f"{count_text(sizes.parameters)}, {count_text(sizes.parameters_active)} active for a token"),
        ("", f"{shared} shared, {count_text(sizes.parameters_group)} in each of {groups} groups"),
        ("a peer sends", f"about {bytes_text(sizes.contribution_bytes)} a round, with {owned}"),
        (
            "and fetches",
            f"about {bytes_text(fetched)} a round, with {peers} peers "
            f"({bytes_text(fetched_fp32)} in fp32, {ratio:.1f} times as much)",
        ),
        ("", "and passes on about as much as it fetches"),
    ]


def setting_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Every setting by its dotted key; a source of data is one row, however many files it has."""
    rows: list[tuple[str, str]] = []
    for key, value in to_plain(manifest).items():
        if key == "data":
            continue
        rows.extend(_flat(key, value))
    data = manifest.data
    rows += [(f"data.sources[{i}]", _source_text(source)) for i, source in enumerate(data.sources)]
    rows.append(("data.heldout", _source_text(data.heldout)))
    rows.append(("data.heldout_bytes", str(data.heldout_bytes)))
    rows += _flat("data.tokenizer", to_plain(data.tokenizer))
    return rows


def _flat(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, item in value.items() for row in _flat(f"{path}.{key}", item)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [row for i, item in enumerate(value) for row in _flat(f"{path}[{i}]", item)]
    if isinstance(value, list):
        return [(path, ", ".join(map(str, value)) or "none")]
    return [(path, value.hex() if isinstance(value, bytes) else str(value))]


def _source_text(source: Source) -> str:
    files = f"{len(source.shards)} file{'' if len(source.shards) == 1 else 's'}"
    first = source.shards[0]
    return (
        f"{source.name}: {source.format}, {files}, {count_text(source.tokens)} tokens, weight {source.weight:g}, "
        f"first {first.url} (sha256 {first.sha256[:16]}…)"
    )
