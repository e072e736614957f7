"""Presets: complete manifests as nested dicts, except what only the organizer can know.

`tiny` is the configuration of the demo. `1b` and `7b` are the published SPES models; what the publication does not
settle for a swarm (length of the run, batch of a peer, data) carries the mark `FILL_IN`, which `spes run sign` refuses.
"""

from __future__ import annotations

import copy
from typing import Any

from spes_protocols.codec import to_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data

FILL_IN = "FILL IN"
"""Stands where the organizer has to decide; `spes run sign` names the key and what to do."""

_DATA: dict[str, Any] = {
    "heldout_bytes": FILL_IN,
    "sources": [
        {
            "name": "train",
            "format": "npy",
            "weight": 1.0,
            "shards": [{"url": FILL_IN, "sha256": FILL_IN, "bytes": FILL_IN, "tokens": FILL_IN}],
        }
    ],
    "heldout": {
        "name": "heldout",
        "format": "npy",
        "shards": [{"url": FILL_IN, "sha256": FILL_IN, "bytes": FILL_IN, "tokens": FILL_IN}],
    },
    "tokenizer": {"url": FILL_IN, "sha256": FILL_IN, "bytes": FILL_IN, "eos_id": FILL_IN},
}

_TINY: dict[str, Any] = {
    "name": "tiny",
    "description": "A small model for a first run: 16 experts in 4 groups, minutes on a few CPU cores.",
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
    "optimizer": {"lr": 3e-3, "warmup_steps": 20, "total_steps": 240},
    "rounds": {
        "phases": [{"from_step": 0, "steps": 20, "batch_sequences": 8}],
        "grace_seconds": 30.0,
        "blob_seconds": 120.0,
        "propose_seconds": 5.0,
        "vote_seconds": 5.0,
        "stall_seconds": 120.0,
        "lease_seconds": 300.0,
    },
    # alpha 0.1 falling to 0 over the first quarter of the run, at every round: best of the small ablation.
    "merging": {"alpha": 0.1, "interval": 20, "until_step": 60, "top": 4},
    "codecs": {"shared": "int4", "group": "int8"},
}

# Published: AdamW and schedule, H = 50 the best trade-off, merging T_w 12 500 with interval 300.
_LARGE: dict[str, Any] = {
    "rounds": {"phases": [{"from_step": 0, "steps": 50, "batch_sequences": FILL_IN}]},
    "merging": {"alpha": 0.1, "interval": 300, "until_step": 12_500, "top": 4},
    "codecs": {"shared": "int4", "group": "int8"},
}

_1B: dict[str, Any] = {
    **_LARGE,
    "name": "1b",
    "description": "The published 1B SPES model: 16 experts, top-2.",
    "model": {
        "vocab_size": 151_665,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "sequence_length": 2048,
        "rope_theta": 500_000.0,
    },
    "ownership": {"groups": 16, "min_peers": 4},
    "optimizer": {"lr": 5e-4, "warmup_steps": 2000, "total_steps": FILL_IN},
}

_7B: dict[str, Any] = {
    **_LARGE,
    "name": "7b",
    "description": "The published 7B SPES model: 32 experts, top-4.",
    "model": {
        "vocab_size": 151_665,
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
    "optimizer": {"lr": 4e-4, "warmup_steps": 2000, "total_steps": FILL_IN},
}

PRESETS: dict[str, dict[str, Any]] = {"tiny": _TINY, "1b": _1B, "7b": _7B}


def new_manifest(preset: str, *, name: str = "", seed: int = 0, data: Data | None = None) -> dict[str, Any]:
    """A manifest as nested dicts, for `manifest_toml.render`; without `data` its tables hold `FILL_IN`.

    Raises `UserError` for an unknown preset.
    """
    if preset not in PRESETS:
        raise UserError(f"no preset {preset!r}; expected one of {', '.join(PRESETS)}")
    plain = copy.deepcopy(PRESETS[preset])
    plain["name"] = name or plain["name"]
    plain["seed"] = seed
    plain["data"] = copy.deepcopy(_DATA) if data is None else to_plain(data)
    return plain
