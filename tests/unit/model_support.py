"""A tiny model, random states of it, and an independent dense float64 version of its mathematics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.delta.numeric import FloatArray
from spes_protocols.manifest import Loss, Model

GROUPS = 4
QWEN3 = {"num_key_value_heads": 2, "head_dim": 16, "qk_norm": "head", "norm_topk_prob": True}
"""What makes a model of four heads one of Qwen3-MoE's kind."""

MODEL = Model(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=16,
)


def random_state(
    model: Model = MODEL, groups: int = GROUPS, seed: int = 0, scale: float = 0.2
) -> dict[str, FloatArray]:
    """Values large enough that no part of the model is close to linear; norms around one."""
    rng = np.random.default_rng(seed)
    state = {}
    for spec in tensor_specs(model, GROUPS):
        values = rng.standard_normal(spec.shape) * scale
        state[spec.name] = (values + 1.0 if len(spec.shape) == 1 else values).astype(np.float32)
    return state


def random_tokens(count: int, length: int, model: Model = MODEL, seed: int = 1) -> Tensor:
    """Token ids (count, length)."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, model.vocab_size, (count, length)))


def dense_loss(
    state: Mapping[str, Tensor], model: Model, tokens: Tensor, factors: Loss, bias_E: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """(total loss, cross-entropy) of sequences (n, length + 1): every expert runs on every token, logits are whole.

    `bias_E` is the bias of the router towards some experts.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    count, length = inputs.shape
    width = model.head_width
    frequencies = model.rope_theta ** -(torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(length)[:, None] * frequencies)

    def norm(x: Tensor, name: str) -> Tensor:
        return state[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt()

    def heads(x: Tensor) -> Tensor:
        return x.reshape(count, length, -1, width).transpose(1, 2)

    def normed_heads(x: Tensor, name: str) -> Tensor:
        return norm(heads(x), name) if model.qk_norm == "head" else heads(norm(x, name))

    def shared(x: Tensor) -> Tensor:
        return x.repeat_interleave(model.num_attention_heads // model.kv_heads, dim=1)

    def turned(x: Tensor) -> Tensor:
        rotated = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * turns
        return torch.cat((rotated.real, rotated.imag), -1)

    x = state["model.embed_tokens.weight"][inputs]
    balance, router_z = [], []
    for layer in range(model.num_hidden_layers):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (h @ state[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
        q = turned(normed_heads(q, f"{at}.self_attn.q_norm"))
        k = shared(turned(normed_heads(k, f"{at}.self_attn.k_norm")))
        scores = q @ k.transpose(-1, -2) / width**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        y = (scores.softmax(-1) @ shared(heads(v))).transpose(1, 2).reshape(count, length, -1)
        x = x + y @ state[f"{at}.self_attn.o_proj.weight"].T

        h = norm(x, f"{at}.post_attention_layernorm").reshape(count * length, -1)
        logits = h @ state[f"{at}.mlp.gate.weight"].T
        probs = (logits + bias_E).softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(model.num_experts_per_tok).indices, 1.0)
        weights = probs * chosen
        if model.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(h)
        for expert in range(model.num_experts):
            gate, up, down = (state[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            y = y + weights[:, expert, None] * ((F.silu(h @ gate.T) * (h @ up.T)) @ down.T)
        x = x + y.reshape(x.shape)
        balance.append(model.num_experts * (chosen.mean(0) / model.num_experts_per_tok * probs.mean(0)).sum())
        router_z.append(logits.logsumexp(-1).pow(2).mean())

    logits = (norm(x, "model.norm") @ state["lm_head.weight"].T).reshape(count * length, -1)
    cross_entropy = F.cross_entropy(logits, targets.reshape(-1))
    total = (
        cross_entropy
        + factors.softmax_z * logits.logsumexp(-1).pow(2).mean()
        + factors.load_balance * torch.stack(balance).mean()
        + factors.router_z * torch.stack(router_z).mean()
    )
    return total, cross_entropy
