"""What the published models were trained on: sources with their weights, for the manifests of `presets`.

Only an organizer can say which files a run reads, and what their digests are. So each source carries its name on the
hub and its weight, and the mark `FILL_IN` where its files go. A weight is the source's share of the token files that
the released configurations list; these are alike in size (at most 4 GiB of uint32 tokens).
"""

from __future__ import annotations

from typing import Any

FILL_IN = "FILL IN"
"""Begins every value that the organizer has to decide; `spes run sign` names the key and what to do."""

TOKENIZER = "Qwen/Qwen2.5-0.5B"
"""The published models' tokenizer; its vocabulary ends at 151 665, its end of text is 151 643."""

_EOS_ID = 151_643

# (name, what it is on the hub, share of the tokens)
Mixture = tuple[tuple[str, str, float], ...]

SLIMPAJAMA: Mixture = (("slimpajama", "datasets/cerebras/SlimPajama-627B", 1.0),)

# 1040 files of Ultra-FineWeb, 442 of SlimPajama, and five subsets of OLMo-Mix with 107, 12, 8, 7 and 6.
WEB_AND_OLMO: Mixture = (
    ("ultra-fineweb", "datasets/openbmb/Ultra-FineWeb", 0.6412),
    ("slimpajama", "datasets/cerebras/SlimPajama-627B", 0.2725),
    ("olmo-mix-starcoder", "datasets/allenai/olmo-mix-1124/data/starcoder", 0.0660),
    ("olmo-mix-arxiv", "datasets/allenai/olmo-mix-1124/data/arxiv", 0.0074),
    ("olmo-mix-pes2o", "datasets/allenai/olmo-mix-1124/data/pes2o", 0.0049),
    ("olmo-mix-algebraic-stack", "datasets/allenai/olmo-mix-1124/data/algebraic-stack", 0.0043),
    ("olmo-mix-open-web-math", "datasets/allenai/olmo-mix-1124/data/open-web-math", 0.0037),
)

# 613, 133 and 75 files of three parts of Nemotron-CC, 212 of mathematics, 154 of code; 45, 43 and 20 of instructions.
NEMOTRON: Mixture = (
    ("nemotron-cc-high-quality-synthetic", "datasets/nvidia/Nemotron-CC-v2/High-Quality-Synthetic", 0.4734),
    ("nemotron-cc-math", "datasets/nvidia/Nemotron-CC-Math-v1/4plus", 0.1637),
    ("nemotron-code-synthetic", "datasets/nvidia/Nemotron-Pretraining-Code-v1/Synthetic-Code", 0.1189),
    ("nemotron-cc-high-quality", "datasets/nvidia/Nemotron-CC-v2/High-Quality", 0.1027),
    ("nemotron-cc-diverse-qa", "datasets/nvidia/Nemotron-CC-v2/Diverse-QA", 0.0579),
    ("nemotron-sft-general", "datasets/nvidia/Nemotron-Pretraining-SFT-v1/Nemotron-SFT-General", 0.0348),
    ("nemotron-sft-code", "datasets/nvidia/Nemotron-Pretraining-SFT-v1/Nemotron-SFT-Code", 0.0332),
    ("nemotron-sft-math", "datasets/nvidia/Nemotron-Pretraining-SFT-v1/Nemotron-SFT-MATH", 0.0154),
)


def data_tables(mixture: Mixture = ()) -> dict[str, Any]:
    """The manifest's `data` as nested dicts: all that can be known of it before somebody has read the files.

    Without a mixture one source stands there, and nothing is known of the tokenizer either.
    """
    if not mixture:
        return {
            "heldout_bytes": FILL_IN,
            "sources": [{"name": "train", "format": "npy", "weight": 1.0, "shards": [_shard(FILL_IN)]}],
            "heldout": {"name": "heldout", "format": "npy", "shards": [_shard(FILL_IN)]},
            "tokenizer": {"url": FILL_IN, "sha256": FILL_IN, "bytes": FILL_IN, "eos_id": FILL_IN},
        }
    sources = [
        {"name": name, "format": "npy", "weight": weight, "shards": [_shard(f"{FILL_IN}: token files of hf://{hub}")]}
        for name, hub, weight in mixture
    ]
    return {
        "heldout_bytes": FILL_IN,
        "sources": sources,
        "heldout": {"name": "heldout", "format": "npy", "shards": [_shard(FILL_IN)]},
        "tokenizer": {
            "url": f"{FILL_IN}: tokenizer.json of hf://{TOKENIZER}",
            "sha256": FILL_IN,
            "bytes": FILL_IN,
            "eos_id": _EOS_ID,
        },
    }


def _shard(url: str) -> dict[str, Any]:
    return {"url": url, "sha256": FILL_IN, "bytes": FILL_IN, "tokens": FILL_IN}
