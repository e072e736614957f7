"""Manifests, claims and headers with extreme but well-formed numbers are refused in a sentence, or harmless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.core.tensors import section_specs
from spes_p2p.delta.codecs import section_bytes
from spes_p2p.delta.contributions import check_blobs
from spes_protocols.codec import encode
from spes_protocols.errors import SchemaError
from spes_protocols.messages import SHARED, SnapshotIndex, TensorIndex
from tests.unit.log_support import ADA, BOB, MODEL, RunLog

SEVEN_B = replace(
    MODEL,
    vocab_size=50_304,
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 256, "num_experts": 4096},
        {"vocab_size": 1_000_000, "hidden_size": 65_536},
        {"hidden_size": 65_536, "intermediate_size": 262_144, "num_experts": 4096},
    ],
)
def test_a_model_that_no_peer_could_serve_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SchemaError, match="snapshot"):
        replace(SEVEN_B, **changes)


def test_models_of_today_are_not() -> None:
    replace(SEVEN_B, num_hidden_layers=32, num_experts=128)
    replace(SEVEN_B, num_hidden_layers=48, hidden_size=2048, intermediate_size=768, num_experts=128, vocab_size=152_000)


def test_the_bound_is_that_of_the_largest_index() -> None:
    """What the schema reckons is no less than what an index takes, or it could not be sent."""
    model = MODEL
    specs = [spec for name in (SHARED, "group/0", "group/1") for spec in section_specs(model, 2, name)]
    leaf = bytes(32)
    tensors = tuple(TensorIndex(name=spec.name, shape=spec.shape, leaves=(leaf,)) for spec in specs)
    assert len(encode(SnapshotIndex(round=1, tensors=tensors))) <= model.index_bytes


def test_a_blob_of_another_size_than_announced_is_no_good_contribution(tmp_path: Path) -> None:
    """Who has it from elsewhere must not take for good what nobody else can fetch."""
    log = RunLog(tmp_path / "run")
    log.start([log.claim(ADA), log.claim(BOB)])
    section = log.section(SHARED)
    assert section.size == section_bytes(section_specs(MODEL, 2, SHARED), section.codec)
    assert check_blobs(log.manifest, ADA.peer_id, [section], log.blobs.path).check is None
    lie = replace(section, size=section.size - 1)
    assert check_blobs(log.manifest, ADA.peer_id, [lie], log.blobs.path).check == "size"
