"""The tensors of a model and the section each belongs to (SPEC 6.1): what every peer can say without torch.

Names are those of `transformers`' checkpoints of OLMoE and Qwen3-MoE. Expert e belongs to group
`e // (num_experts // groups)` in every layer; everything else is the shared section.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from spes_protocols.manifest import Model
from spes_protocols.messages import SHARED, group_section


@dataclass(frozen=True)
class TensorSpec:
    """One fp32 tensor: its name, shape, section and, for experts, its layer and expert index."""

    name: str
    shape: tuple[int, ...]
    section: str
    layer: int | None = None
    expert: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=8)
def tensor_specs(model: Model, groups: int) -> tuple[TensorSpec, ...]:
    """Every tensor of the model in ascending order of name, the order of snapshots and of the state root."""
    return tuple(sorted(_specs(model, groups), key=lambda spec: spec.name))


def section_specs(model: Model, groups: int, section: str) -> tuple[TensorSpec, ...]:
    """The tensors of one section, in ascending order of name."""
    return tuple(spec for spec in tensor_specs(model, groups) if spec.section == section)


def experts_of(model: Model, groups: int, group: int) -> range:
    """The expert indices of a group, the same in every layer."""
    per_group = model.num_experts // groups
    return range(group * per_group, (group + 1) * per_group)


def _specs(model: Model, groups: int) -> Iterator[TensorSpec]:
    width, hidden = model.hidden_size, model.intermediate_size
    queries, keys = model.num_attention_heads * model.head_width, model.kv_heads * model.head_width
    q_norm, k_norm = (model.head_width, model.head_width) if model.qk_norm == "head" else (queries, keys)
    yield TensorSpec("model.embed_tokens.weight", (model.vocab_size, width), SHARED)
    yield TensorSpec("lm_head.weight", (model.vocab_size, width), SHARED)
    yield TensorSpec("model.norm.weight", (width,), SHARED)
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{prefix}.{name}.weight", (width,), SHARED, layer)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            yield TensorSpec(f"{prefix}.self_attn.{name}.weight", (norm,), SHARED, layer)
        for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield TensorSpec(f"{prefix}.self_attn.{name}.weight", (outputs, width), SHARED, layer)
        yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (width, queries), SHARED, layer)
        yield TensorSpec(f"{prefix}.mlp.gate.weight", (model.num_experts, width), SHARED, layer)
        for group in range(groups):
            section = group_section(group)
            for expert in experts_of(model, groups, group):
                stem = f"{prefix}.mlp.experts.{expert}"
                yield TensorSpec(f"{stem}.gate_proj.weight", (hidden, width), section, layer, expert)
                yield TensorSpec(f"{stem}.up_proj.weight", (hidden, width), section, layer, expert)
                yield TensorSpec(f"{stem}.down_proj.weight", (width, hidden), section, layer, expert)
