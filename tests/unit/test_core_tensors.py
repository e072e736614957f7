"""Tensor layout: names, shapes and sections of a model (SPEC 6.1)."""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.core.tensors import experts_of, section_specs, tensor_specs
from spes_protocols.messages import SHARED, group_section
from tests.sim.records import make_manifest

MODEL = replace(make_manifest(groups=4).model, num_hidden_layers=2, hidden_size=16, intermediate_size=24)


def test_sections_divide_all_tensors() -> None:
    specs = tensor_specs(MODEL, 4)
    assert [spec.name for spec in specs] == sorted({spec.name for spec in specs})
    parts = [section_specs(MODEL, 4, name) for name in (SHARED, *map(group_section, range(4)))]
    assert sorted((spec for part in parts for spec in part), key=lambda spec: spec.name) == list(specs)
    assert section_specs(MODEL, 4, "group/4") == ()


def test_sizes_are_those_of_the_architecture() -> None:
    width, hidden, vocabulary, experts, layers = 16, 24, 64, 8, 2
    shared = 2 * vocabulary * width + width + layers * (4 * width + 4 * width * width + experts * width)
    assert sum(spec.size for spec in section_specs(MODEL, 4, SHARED)) == shared
    for group in range(4):
        assert (
            sum(spec.size for spec in section_specs(MODEL, 4, group_section(group))) == layers * 2 * 3 * width * hidden
        )


def test_a_group_is_the_same_experts_in_every_layer() -> None:
    assert [experts_of(MODEL, 4, group) for group in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    for group in range(4):
        found = {(spec.layer, spec.expert) for spec in section_specs(MODEL, 4, group_section(group))}
        assert found == {(layer, expert) for layer in range(2) for expert in experts_of(MODEL, 4, group)}


def test_names_and_shapes_are_those_of_olmoe() -> None:
    shapes = {spec.name: spec.shape for spec in tensor_specs(MODEL, 4)}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (64, 16)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (16,)
    assert shapes["model.layers.0.mlp.gate.weight"] == (8, 16)
    assert shapes["model.layers.1.mlp.experts.7.gate_proj.weight"] == (24, 16)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (16, 24)
