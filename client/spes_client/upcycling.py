"""`spes run new --upcycle DIR`: a manifest, and the file of its first state, from a dense Qwen3 checkpoint.

DIR --spes_p2p.model.upcycle--> run.genesis.safetensors, its root in run.toml --spes run sign--> run.spes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spes_client import ui
from spes_client.presets import FILL_IN, new_manifest
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.model.upcycle import DenseCheckpoint, FloatArray, upcycled
from spes_p2p.store.first_state import beside, write_state
from spes_protocols.errors import UserError


def upcycle(args: argparse.Namespace, common: Mapping[str, Any], output: Path) -> tuple[dict[str, Any], Path]:
    """The manifest as nested dicts, and the file with its first state, written beside `output`.

    `common` is what `new_manifest` is called with. Raises `UserError` for a checkpoint that cannot be used, naming what
    is wrong with it, and where a first state is there already (unless forced).
    """
    path = beside(output)
    if path.exists() and not args.force:
        raise UserError(f"{path} exists; choose another name with -o, or overwrite it with --force")
    dense = DenseCheckpoint.open(Path(args.upcycle).expanduser())
    wanted = new_manifest(args.preset)["model"]
    model = dense.model(**{key: wanted[key] for key in ("num_experts", "num_experts_per_tok", "sequence_length")})
    plain = new_manifest(args.preset, **common, model=model)
    groups = plain["ownership"]["groups"]
    specs = [(spec.name, spec.shape) for spec in tensor_specs(model, groups)]
    with ui.progress() as report:

        def tensors() -> Iterator[tuple[str, FloatArray]]:
            made = upcycled(dense, model, groups, common["seed"], noise_share=args.upcycle_noise)
            for number, pair in enumerate(made):
                report(f"writing {path}", number / len(specs))
                yield pair

        plain["genesis_root"] = write_state(path, specs, tensors()).hex()
    plain["data"]["tokenizer"] |= _tokenizer(dense, model.vocab_size) if common["data"] is None else {}
    return plain, path


def _tokenizer(dense: DenseCheckpoint, vocab_size: int) -> dict[str, Any]:
    """What is known of the tokenizer: a model that can read already must go on with its own."""
    found = dense.config.get("eos_token_id")
    eos_id = found[0] if isinstance(found, list) and found else found
    known = isinstance(eos_id, int) and not isinstance(eos_id, bool) and 0 <= eos_id < vocab_size
    return {"url": f"{FILL_IN}: the tokenizer.json of the dense checkpoint", "eos_id": eos_id if known else FILL_IN}
