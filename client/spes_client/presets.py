"""Presets: complete manifests as nested dicts, except what only the organizer can know.

`tiny` is the configuration of the demo. `1b`, `2b`, `7b` and `9b` are the models of the SPES paper (arXiv 2602.11543,
section 4): architecture, optimiser, schedule, merging and data. Where paper and released code differ, the paper counts.
What the organizer has to decide carries the mark `FILL_IN`, which `spes run sign` refuses.

    preset, nodes, tokens --> groups, batch of a node, phases of rounds, length of the schedule --> manifest
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from spes_client.mixtures import FILL_IN, NEMOTRON, SLIMPAJAMA, WEB_AND_OLMO, Mixture, data_tables
from spes_protocols.codec import to_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data, Model

__all__ = ["FILL_IN", "PRESETS", "UPCYCLED", "new_manifest"]

LATE_SHARE, LATE_STEPS = 0.3, 50
"""The last share of the tokens, for which the paper's large runs halve each node's batch, and H for it."""

_QWEN_VOCABULARY = 151_665


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run is and how its steps are cut: `sequences` in a step of all `nodes` together, H local `steps`.

    `halves`: whether each node's batch is halved, and H is `LATE_STEPS`, for the last `LATE_SHARE` of the tokens.
    """

    nodes: int
    sequences: int
    tokens: int
    steps: int
    halves: bool


_TINY: dict[str, Any] = {
    "name": "tiny",
    "description": "A small model for a first run: 16 experts, minutes on a few CPU cores.",
    "model": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "sequence_length": 128,
        "rope_theta": 10_000.0,
    },
    "ownership": {"groups": 4, "min_peers": 4},
    "optimizer": {"lr": 3e-3, "warmup_steps": 20},
    "rounds": {
        "grace_seconds": 30.0,
        "blob_seconds": 120.0,
        "propose_seconds": 5.0,
        "vote_seconds": 5.0,
        "stall_seconds": 120.0,
        "lease_seconds": 300.0,
    },
    # alpha 0.1 falling to 0 over the first quarter of the run, at every round: best of the small ablation.
    "merging": {"alpha": 0.1, "interval": 20, "top": 4},
    # Falls over the whole schedule: the best of docs/lab.md. The published presets have none, as they were published.
    "routing": {"owned_bias": 4.0},
    "codecs": {"shared": "int4", "group": "int8"},
}

# Losses are the paper's, which are the manifest's defaults: load balancing 0.01, router z 0.001, softmax z 1e-5 (the
# released code never reads its setting of the last and uses 1e-4). AdamW's too: betas 0.9 and 0.95, eps 1e-8, weight
# decay 0.1 on everything, clipping at 1, cosine to a tenth.
_PUBLISHED: dict[str, Any] = {
    # The best of the paper's ablation, T_w = 12 500 and interval 300; the released defaults are 10 000 and 500.
    "merging": {"alpha": 0.1, "interval": 300, "until_step": 12_500, "top": 4},
    "codecs": {"shared": "int4", "group": "int8"},
}

_1B: dict[str, Any] = {
    **_PUBLISHED,
    "name": "1b",
    "description": "The 1B model of the SPES paper's ablations: 16 experts, top-2.",
    "model": {
        "vocab_size": _QWEN_VOCABULARY,
        "hidden_size": 768,
        # The released configuration says 4096, which its code halves: gate and up projection together.
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "sequence_length": 2048,
        "rope_theta": 500_000.0,
    },
    "ownership": {"groups": 16, "min_peers": 4},
    "optimizer": {"lr": 5e-4, "warmup_steps": 2000},
}

# The released code has no configuration of the 2B model. Width and depth here are those that give its published size
# and its memory on 16 nodes with the 1B model's experts, routing and optimiser.
_2B: dict[str, Any] = {
    **_1B,
    "name": "2b",
    "description": "The size of the 2B model of the SPES paper, for 16 nodes: 16 experts, top-2.",
    "model": _1B["model"] | {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16},
}

_7B: dict[str, Any] = {
    **_PUBLISHED,
    "name": "7b",
    "description": "The 7B model of the SPES paper: 32 experts, top-4.",
    "model": {
        "vocab_size": _QWEN_VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "sequence_length": 2048,
        "rope_theta": 32_000.0,
    },
    "ownership": {"groups": 16, "min_peers": 4},
    "optimizer": {"lr": 4e-4, "warmup_steps": 2000},
}

# Qwen3-1.7B's dimensions, its output layer made a matrix of its own; eight copies of each MLP as experts.
_9B: dict[str, Any] = {
    **_PUBLISHED,
    "name": "9b",
    "description": "The 9B model of the SPES paper, upcycled from a dense Qwen3: 8 experts, top-2.",
    "genesis": "snapshot",
    "genesis_root": FILL_IN,
    "model": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "sequence_length": 4096,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "qk_norm": "head",
        "norm_topk_prob": True,
    },
    "ownership": {"groups": 8, "min_peers": 4},
    "optimizer": {"lr": 1e-4, "warmup_steps": 1000},
    # Experts that begin alike have nothing to catch up on: the released server's gentle defaults, not the ablation's.
    "merging": {"alpha": 0.01, "interval": 500, "until_step": 10_000, "top": 4},
}

# Sequences of a step and tokens are the released configurations' (9b: as far as its learning rate falls), the step's
# sequences taken as those of all nodes together, as the names of the 1B configurations do. H = 50 is the best of the
# paper's ablation, which is of the 1B model; its 2B and 7B runs halve the batch at last, and 9b follows them. 2b has no
# released schedule: it gets the 1B model's tokens until the organizer says otherwise with --tokens.
_PLANS: dict[str, Plan] = {
    "tiny": Plan(nodes=4, sequences=32, tokens=240 * 32 * 128, steps=20, halves=False),
    "1b": Plan(nodes=4, sequences=1024, tokens=50_000 * 1024 * 2048, steps=50, halves=False),
    "2b": Plan(nodes=16, sequences=1024, tokens=50_000 * 1024 * 2048, steps=100, halves=True),
    "7b": Plan(nodes=4, sequences=1024, tokens=500_000 * 1024 * 2048, steps=100, halves=True),
    "9b": Plan(nodes=4, sequences=256, tokens=100_000 * 256 * 4096, steps=100, halves=True),
}

_MIXTURES: dict[str, Mixture] = {
    "1b": SLIMPAJAMA,
    "2b": WEB_AND_OLMO,
    "7b": WEB_AND_OLMO,
    "9b": NEMOTRON,
}


def _phases(plan: Plan, nodes: int, tokens: int, sequence_length: int) -> tuple[list[dict[str, int]], int]:
    """(phases of rounds, schedule steps in all) for so many nodes and tokens; phases end on whole rounds.

    Raises `UserError` when a step has less than a sequence for each node, or the tokens are not one round's.
    """
    batch = plan.sequences // nodes
    if batch < (2 if plan.halves else 1):
        raise UserError(f"a step of {plan.sequences} sequences cannot be divided among {nodes} nodes; use fewer")
    step_tokens = nodes * batch * sequence_length
    if tokens < plan.steps * step_tokens:
        raise UserError(
            f"{tokens} tokens are less than a round's, {plan.steps} steps of {step_tokens} tokens; use more"
        )
    early_share = 1 - LATE_SHARE if plan.halves else 1.0
    early = _whole_rounds(early_share * tokens / step_tokens, plan.steps)
    phases = [{"from_step": 0, "steps": plan.steps, "batch_sequences": batch}]
    if not plan.halves:
        return phases, early
    late_tokens = nodes * (batch // 2) * sequence_length
    phases.append({"from_step": early, "steps": LATE_STEPS, "batch_sequences": batch // 2})
    return phases, early + _whole_rounds(LATE_SHARE * tokens / late_tokens, LATE_STEPS)


def _whole_rounds(steps: float, round_steps: int) -> int:
    return max(1, round(steps / round_steps)) * round_steps


def _groups(experts: int, nodes: int) -> int:
    """One group for each node, as far as the experts can be divided so."""
    return max(groups for groups in range(1, min(experts, nodes) + 1) if experts % groups == 0)


def new_manifest(
    preset: str,
    *,
    name: str = "",
    seed: int = 0,
    data: Data | None = None,
    nodes: int | None = None,
    tokens: int | None = None,
    model: Model | None = None,
) -> dict[str, Any]:
    """A manifest as nested dicts, for `manifest_toml.render`; without `data` its tables hold `FILL_IN`.

    `nodes`: for a run of so many nodes: a group for each, and the published batch of a step divided among them
    (default: the preset's groups, and its published number of nodes). `tokens`: length of the run (default: the
    preset's). `model` replaces the preset's architecture (an upcycled checkpoint's). Raises `UserError` for an unknown
    preset, or nodes and tokens that it cannot be cut for.
    """
    if preset not in PRESETS:
        raise UserError(f"no preset {preset!r}; expected one of {', '.join(PRESETS)}")
    plain = copy.deepcopy(PRESETS[preset])
    plain["name"] = name or plain["name"]
    plain["seed"] = seed
    plain["data"] = data_tables(_MIXTURES.get(preset, ())) if data is None else to_plain(data)
    if model is not None:
        plain["model"] = to_plain(model)
    if nodes is not None:
        groups = _groups(plain["model"]["num_experts"], nodes)
        plain["ownership"] = {"groups": groups, "min_peers": groups}
    _schedule(plain, _PLANS[preset], nodes, tokens)
    return plain


def _schedule(plain: dict[str, Any], plan: Plan, nodes: int | None, tokens: int | None) -> None:
    """Write the phases, and the length of the learning rate's schedule, into a manifest."""
    length = plain["model"]["sequence_length"]
    phases, steps = _phases(plan, nodes or plan.nodes, tokens or plan.tokens, length)
    plain["rounds"] = plain.get("rounds", {}) | {"phases": phases}
    plain["optimizer"]["total_steps"] = steps
    if "routing" in plain:
        plain["routing"]["owned_bias_until_step"] = steps
        plain["merging"]["until_step"] = steps // 4


def _preset(plain: dict[str, Any]) -> dict[str, Any]:
    whole = copy.deepcopy(plain)
    _schedule(whole, _PLANS[plain["name"]], None, None)
    return whole


UPCYCLED = ("9b",)
"""Presets whose first weights come from a dense checkpoint."""

PRESETS: dict[str, dict[str, Any]] = {plain["name"]: _preset(plain) for plain in (_TINY, _1B, _2B, _7B, _9B)}
