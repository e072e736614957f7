"""The Mixture-of-Experts language model: OLMoE's names and mathematics, with experts that are owned or frozen.

A round begins by loading the global state into this model and ends by subtracting that state from it. Parameters
carry the names of `core.tensors.tensor_specs`, one `Parameter` per (layer, expert, matrix), so that owning an expert is
a flag on three parameters a layer: trainable ones are fp32, frozen ones lie as the engine says (`core.engine`: fp32,
bf16, or int8 in blocks) and cost no gradient. What is not in the compute dtype is converted where it is used.

Architecture (SPES paper, section 4; OLMoE): pre-norm decoder, RMSNorm, QK-norm over the whole width before the heads
are split, rotary positions by half rotation, no biases, untied embeddings, dropless top-k routing whose weights are the
softmax over all experts, not renormalised. A manifest may ask for Qwen3-MoE's variants instead: QK-norm in each head,
fewer heads for keys and values, renormalised weights.

Shape suffixes:
    B  sequences             D  hidden_size            E  num_experts
    S  tokens per sequence   F  intermediate_size      K  num_experts_per_tok
    T  tokens, B*S           H  attention heads        R  rows, T*K: a token once for each expert chosen for it
    V  vocab_size            A  width of a head          G  experts of a stack, the frozen ones
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spes_p2p.core.engine import Engine
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.model.frozen import dequantise, grouped_linear, linear, quantise
from spes_p2p.model.sharding import is_part, local, rows_of, shard
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from spes_protocols.messages import section_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Routing(NamedTuple):
    """One layer's routing, for the auxiliary losses: fp32 logits and softmax, and how many tokens each expert got.

    A bias towards owned experts is in the softmax and the counts, which then balance the owned experts among
    themselves, and not in the logits, whose size the z-loss bounds.
    """

    logits_TE: Tensor
    probs_TE: Tensor
    counts_E: Tensor


FORMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""The engine's words for what a weight or a gradient is kept in."""


GROUPED_BYTES = 16
"""Rows of what a grouped product takes must begin at multiples of this."""


class Linear(nn.Module):
    """A matrix without bias, used in its input's dtype whatever form it is kept in; int8 with `scales`."""

    scales: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_buffer("scales", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.scales)

    def keep_as(self, form: torch.dtype) -> None:
        """Put the values into another form, in place of the one they had. int8 is for what is not trained."""
        if self.weight.dtype == form:
            return
        held = self.weight.data
        values = held if self.scales is None else dequantise(held, self.scales, torch.float32)
        if form == torch.int8:
            self.weight.data, self.scales = quantise(values)
        else:
            self.weight.data, self.scales = values.to(form), None

    def load(self, values: Tensor) -> None:
        """Copy fp32 values in, in the form that is kept."""
        if self.scales is None:
            local(self.weight).copy_(rows_of(values, self.weight))
            return
        codes, scales = quantise(values.to(self.weight.device))
        local(self.weight).copy_(rows_of(codes, self.weight))
        self.scales.copy_(scales)  # whole in every process: a block may lie across two parts


class Embedding(nn.Module):
    """A row for each token id."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the whole width, in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_tables(model: Model, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, fp32, each (length, A)."""
    width = model.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / (model.rope_theta**exponents)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    angles_SA = torch.cat((angles, angles), dim=-1)
    return angles_SA.cos(), angles_SA.sin()


def rotate(x_BHSA: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
    """Rotate each pair (a, a + A/2) of a head by its position's angle."""
    first, second = x_BHSA.chunk(2, dim=-1)
    return x_BHSA * cos_SA + torch.cat((-second, first), dim=-1) * sin_SA


class Attention(nn.Module):
    """Causal multi-head self-attention; QK-norm over the whole width, or in each head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, self.head_width = model.hidden_size, model.head_width
        queries, keys = model.num_attention_heads * self.head_width, model.kv_heads * self.head_width
        self.norm_in_heads = model.qk_norm == "head"
        self.shares_keys = keys < queries
        self.q_proj = Linear(width, queries)
        self.k_proj = Linear(width, keys)
        self.v_proj = Linear(width, keys)
        self.o_proj = Linear(queries, width)
        self.q_norm = RMSNorm(self.head_width if self.norm_in_heads else queries, model.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_width if self.norm_in_heads else keys, model.rms_norm_eps)

    def forward(self, x_BSD: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
        q_BHSA = rotate(self._normed(self.q_proj(x_BSD), self.q_norm), cos_SA, sin_SA)
        k_BHSA = rotate(self._normed(self.k_proj(x_BSD), self.k_norm), cos_SA, sin_SA)
        v_BHSA = self._split(self.v_proj(x_BSD))
        y_BHSA = F.scaled_dot_product_attention(q_BHSA, k_BHSA, v_BHSA, is_causal=True, enable_gqa=self.shares_keys)
        return self.o_proj(y_BHSA.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _normed(self, x_BSD: Tensor, norm: RMSNorm) -> Tensor:
        return norm(self._split(x_BSD)) if self.norm_in_heads else self._split(norm(x_BSD))

    def _split(self, x_BSD: Tensor) -> Tensor:
        heads_BSHA: Tensor = x_BSD.unflatten(-1, (-1, self.head_width))
        return heads_BSHA.transpose(1, 2)


def swiglu(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """What stands between an expert's matrices."""
    return F.silu(gate_RF) * up_RF


class Expert(nn.Module):
    """One SwiGLU feed-forward expert."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden)
        self.up_proj = Linear(width, hidden)
        self.down_proj = Linear(hidden, width)
        self.activation = swiglu

    @property
    def is_trained(self) -> bool:
        """Whether it is among the owned ones."""
        return self.gate_proj.weight.requires_grad

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x_RD), self.up_proj(x_RD)))  # type: ignore[no-any-return]


class Stacks(NamedTuple):
    """A layer's G frozen experts as three stacks, which hold the parameters' own memory; frozen ones come first."""

    places_E: Tensor
    frozen_G: Tensor
    owned: list[int]
    gate_GFD: Tensor
    up_GFD: Tensor
    down_GDF: Tensor


class SparseMLP(nn.Module):
    """Dropless mixture of experts: every token goes to its `num_experts_per_tok` most probable experts."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = Linear(model.hidden_size, model.num_experts)
        self.experts = nn.ModuleList(
            Expert(model.hidden_size, model.intermediate_size) for _ in range(model.num_experts)
        )
        self.top = model.num_experts_per_tok
        self.renormalises = model.norm_topk_prob
        self.bias_E: Tensor | None = None
        self.activation = swiglu
        self.stacks: Stacks | None = None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        logits_TE = self.gate(x_TD.float())
        probs_TE = (logits_TE if self.bias_E is None else logits_TE + self.bias_E).softmax(-1)
        weights_TK, chosen_TK = probs_TE.topk(self.top, dim=-1)
        if self.renormalises:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        counts_E = chosen_TK.flatten().bincount(minlength=len(self.experts))

        # Sort the rows by expert once (stable: the result does not depend on the sorting routine), run each expert on
        # its slice, put the rows back in the order of tokens and sum each token's K rows.
        places_TK = chosen_TK if self.stacks is None else self.stacks.places_E[chosen_TK]
        order_R = places_TK.flatten().argsort(stable=True)
        rows_RD = x_TD.index_select(0, order_R // self.top)
        outputs = self._experts_of(rows_RD, counts_E)
        sorted_RD = torch.cat(outputs) * weights_TK.flatten()[order_R, None].to(x_TD.dtype)
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        y_TD = sorted_RD.index_select(0, back_R).unflatten(0, (-1, self.top)).sum(1)
        return y_TD, Routing(logits_TE, probs_TE, counts_E)

    def _experts_of(self, rows_RD: Tensor, counts_E: Tensor) -> list[Tensor]:
        """What the experts make of their rows, in the rows' order; a frozen expert without rows is left out.

        A trained one takes part even so: its gradient is then zero, and AdamW goes on forgetting.
        """
        stacks, counts = self.stacks, counts_E.tolist()
        if stacks is None:
            return [
                expert(rows)
                for expert, rows in zip(self.experts, rows_RD.split(counts), strict=True)
                if rows.shape[0] or expert.is_trained
            ]
        theirs = [counts[e] for e in stacks.owned]
        first_RD, *others = rows_RD.split([rows_RD.shape[0] - sum(theirs), *theirs])
        outputs = [self.experts[e](rows) for e, rows in zip(stacks.owned, others, strict=True)]
        if not first_RD.shape[0]:
            return outputs
        ends_G = counts_E[stacks.frozen_G].cumsum(0).to(torch.int32)
        gate_RF, up_RF = (grouped_linear(first_RD, stack, ends_G) for stack in (stacks.gate_GFD, stacks.up_GFD))
        hidden_RF = self.activation(gate_RF, up_RF)
        return [grouped_linear(hidden_RF, stacks.down_GDF, ends_G), *outputs]

    def stack(self) -> None:
        """Lay the frozen experts' matrices side by side for grouped products; each parameter is a part of its stack.

        Owned experts stay by themselves: their gradient's product would need every expert's rows padded to 16 bytes.
        """
        owned = [e for e, expert in enumerate(self.experts) if expert.is_trained]
        frozen = [e for e in range(len(self.experts)) if e not in owned]
        if self.stacks is not None and self.stacks.owned == owned:
            return
        self.stacks = None
        stacked = []
        for name in ("gate_proj", "up_proj", "down_proj"):
            matrices = [getattr(expert, name).weight for expert in self.experts]
            for e in owned:
                if matrices[e].untyped_storage().nbytes() > matrices[e].nbytes:  # a part of a stack that is to go
                    matrices[e].data = matrices[e].data.clone()
            if frozen:
                together = torch.stack([matrices[e].data for e in frozen])
                for place, e in enumerate(frozen):
                    matrices[e].data = together[place]
                stacked.append(together)
        if not frozen:
            return
        device = self.gate.weight.device
        places_E = torch.empty(len(self.experts), dtype=torch.long, device=device)
        places_E[torch.tensor(frozen + owned, device=device)] = torch.arange(len(self.experts), device=device)
        self.stacks = Stacks(places_E, torch.tensor(frozen, device=device), owned, *stacked)


class Layer(nn.Module):
    """Attention and experts, each normalised before and added to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = SparseMLP(model)

    def forward(self, x_BSD: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> tuple[Tensor, Routing]:
        # The residual stream stays in fp32; the branches run in the dtype of the rotary tables, the compute dtype.
        dtype = cos_SA.dtype
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD).to(dtype), cos_SA, sin_SA)
        y_TD, routing = self.mlp(self.post_attention_layernorm(x_BSD).to(dtype).flatten(0, 1))
        return x_BSD + y_TD.view_as(x_BSD), routing


class Decoder(nn.Module):
    """Embeddings, layers and the last norm; exists so that the names are those of the checkpoint."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_hidden_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)


def check_grouped(model: Model, frozen: torch.dtype, compute: torch.dtype) -> None:
    """Raises `UserError` where the grouped product cannot take a model's frozen experts as they lie."""
    if frozen != compute:
        raise UserError(f"grouped products need frozen experts in the compute dtype, {compute}; they are in {frozen}")
    for key in ("hidden_size", "intermediate_size"):
        if getattr(model, key) * compute.itemsize % GROUPED_BYTES:
            multiple = GROUPED_BYTES // compute.itemsize
            raise UserError(f"grouped products need {key} to be a multiple of {multiple}; it is {getattr(model, key)}")


def compile_layers(moe: MoE) -> None:
    """Let torch compile what has the same shapes each time, attention, and the experts' activation for any rows.

    Routing and the experts' products stay as they are: how many rows an expert gets is known on the host alone.
    """
    activation = torch.compile(swiglu, dynamic=True)
    for module in moe.modules():
        if isinstance(module, Attention):
            module.compile()
        elif isinstance(module, Expert | SparseMLP):
            module.activation = activation


class MoE(nn.Module):
    """The whole model. Its parameters hold no values until `load`."""

    def __init__(
        self,
        model: Model,
        groups: int,
        owned: Collection[int] = (),
        compute_dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
        engine: Engine | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """`owned` are the expert groups to train; without `engine` frozen experts lie in the compute dtype.

        With `mesh` this process holds a part of each parameter (`model.sharding`), and what is owned stays as it is.
        Raises `UserError` for a grouped engine where this model and dtype cannot be grouped.
        """
        super().__init__()
        self.config = model
        self.compute_dtype = compute_dtype
        self.engine = engine or Engine(frozen="fp32" if compute_dtype == torch.float32 else "bf16")
        self.groups = groups
        if self.engine.grouped:
            check_grouped(model, FORMS[self.engine.frozen], compute_dtype)
        self.sections = {spec.name: spec.section for spec in tensor_specs(model, groups)}
        # Without memory at first, so that frozen experts never take that of fp32.
        with torch.device("meta"):
            self.model = Decoder(model)
            self.lm_head = Linear(model.hidden_size, model.vocab_size)
        assert {name for name, _ in self.named_parameters()} == self.sections.keys()
        self._choose_forms(owned)
        if self.engine.compile:
            compile_layers(self)
        if mesh is not None:
            shard(self, [self.model.embed_tokens, *self.model.layers], mesh, method="hidden")
        self.to_empty(device=device)
        if mesh is None:
            self.own(owned)  # once more, for parameters that are new objects now

    def own(self, owned: Collection[int]) -> None:
        """Make the experts of these groups trainable (fp32) and freeze the others (in the engine's form).

        A newly owned expert keeps the values it had while frozen: `load` the state afterwards. A model in parts stays
        as it was made.
        """
        assert not is_part(self.lm_head.weight), "the forms of a model in parts are fixed"
        self._choose_forms(owned)
        for module in self.modules():
            if self.engine.grouped and isinstance(module, SparseMLP):
                module.stack()

    def _choose_forms(self, owned: Collection[int]) -> None:
        self.owned = frozenset(owned)
        for prefix, module in self.named_modules():
            for parameter in module.parameters(recurse=False):
                group = section_group(self.sections[f"{prefix}.weight"])
                trainable = group is None or group in owned
                if not trainable:
                    parameter.requires_grad_(False)
                    parameter.grad = None
                if isinstance(module, Linear):
                    module.keep_as(torch.float32 if trainable else FORMS[self.engine.frozen])
                if trainable:
                    parameter.requires_grad_(True)
                    parameter.grad_dtype = FORMS[self.engine.gradients]

    def favour_owned(self, bias: float) -> None:
        """Add `bias` to the router's logits of the experts that are trained, 0 for none; for training only.

        Tokens that meet a frozen expert train no expert: a bias, most of all early in a run, lets fewer of them do so
        (docs/lab.md). Routing and routing weights are those of a softmax over the biased logits.
        """
        per_group = self.config.num_experts // self.groups
        bias_E = [bias if e // per_group in self.owned else 0.0 for e in range(self.config.num_experts)]
        on_device_E = torch.tensor(bias_E, device=self.lm_head.weight.device) if any(bias_E) else None
        for module in self.modules():
            if isinstance(module, SparseMLP):
                module.bias_E = on_device_E

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy a global state (fp32, such as the memory-mapped tensors of a state file) into the parameters."""
        with torch.no_grad():
            for prefix, module in self.named_modules():
                for parameter in module.parameters(recurse=False):
                    name = f"{prefix}.weight"
                    values = np.array(state[name], dtype=np.float32)  # a copy: torch wants writable memory
                    assert values.shape == tuple(parameter.shape), name
                    if isinstance(module, Linear):
                        module.load(torch.from_numpy(values))
                    else:
                        local(parameter).copy_(rows_of(torch.from_numpy(values), parameter))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The shared parameters and those of the owned groups, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def hidden(self, tokens_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        """Normalised hidden states (B, S, D) in the compute dtype, and each layer's routing."""
        tables = rotary_tables(self.config, tokens_BS.shape[1], tokens_BS.device)
        cos_SA, sin_SA = (table.to(self.compute_dtype) for table in tables)
        x_BSD = self.model.embed_tokens(tokens_BS)
        routings: list[Routing] = []
        for layer in self.model.layers:
            if self.engine.recompute and torch.is_grad_enabled():
                x_BSD, routing = checkpoint(layer, x_BSD, cos_SA, sin_SA, use_reentrant=False)
            else:
                x_BSD, routing = layer(x_BSD, cos_SA, sin_SA)
            routings.append(routing)
        return self.model.norm(x_BSD).to(self.compute_dtype), routings

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, S, V). Training never makes them whole: see `loss.training_loss`."""
        x_BSD, _ = self.hidden(tokens_BS)
        return self.lm_head(x_BSD)  # type: ignore[no-any-return]
