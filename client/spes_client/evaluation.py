"""`spes eval`, the part without a harness: bits per byte of texts under an exported checkpoint.

FILE --checkpoint's tokenizer--> tokens --windows of its sequence length--> nats / ln 2 / bytes
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spes_client.digests import FORMATS
from spes_p2p.data.tokenizing import documents, load_tokenizer, token_arrays, vocabulary_size
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.model.export import Checkpoint
from spes_p2p.replay.export import token_data
from spes_p2p.store.rundir import resolve_run_dir
from spes_protocols.errors import UserError

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Text:
    """A text to measure: its tokens (1-D), each document closed by the end token, and its size in UTF-8."""

    name: str
    tokens: npt.NDArray[np.generic]
    bytes: int


def text_of(pair: str, text_key: str, checkpoint: Checkpoint) -> Text:
    """The text of `NAME=FILE`, tokenized as a manifest's held-out text is. Raises `UserError` for one that is unfit."""
    name, equals, file = pair.partition("=")
    if not (name and equals and file):
        raise UserError(f"--text {pair!r}: expected NAME=FILE, such as news=heldout.txt")
    path = Path(file).expanduser()
    source_format = path.suffix.removeprefix(".")
    if source_format not in FORMATS or source_format == "npy":
        raise UserError(f"{path}: expected a text file that ends in .txt, .jsonl or .parquet")
    if not path.is_file():
        raise UserError(f"no file {path}")
    tokenizer = load_tokenizer(checkpoint.tokenizer_path)
    if vocabulary_size(tokenizer) > checkpoint.model.vocab_size:
        raise UserError(f"{checkpoint.tokenizer_path} has more entries than the model's vocabulary")
    texts = list(documents(path, source_format, text_key))
    size = sum(len(text.encode()) for text in texts)
    arrays = list(token_arrays(texts, tokenizer, checkpoint.eos_id))
    tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    if size == 0 or tokens.size < 2:
        raise UserError(f"{path} holds no text to measure")
    return Text(name, tokens, size)


def heldout_text(run_path: Path, checkpoint: Checkpoint, allow_sources: Sequence[str], report: Report) -> Text:
    """The held-out text of a run, which must have the checkpoint's vocabulary and end token. Raises `UserError`."""
    run = resolve_run_dir(run_path)
    manifest = run.manifest.record
    said = (manifest.model.vocab_size, manifest.data.tokenizer.eos_id)
    if said != (checkpoint.model.vocab_size, checkpoint.eos_id):
        raise UserError(
            f"{checkpoint.directory} has another vocabulary than the run at {run_path}: it is not of this run"
        )
    with contextlib.closing(token_data(run, allow_sources, report)) as data:
        tokens = data.heldout()
    return Text(manifest.data.heldout.name, tokens, manifest.data.heldout_bytes)


def measure(text: Text, checkpoint: Checkpoint, threads: int, report: Report) -> float:
    """Bits per byte of a text, on the CPU in fp32. Raises `UserError` where the model gives no number."""
    value = bits_per_byte(
        checkpoint.state,
        checkpoint.model,
        1,
        text.tokens,
        text.bytes,
        threads=threads,
        report=lambda share: report(f"measuring {text.name}", share),
    )
    if not math.isfinite(value):
        raise UserError(f"{checkpoint.directory} gives {value} bits per byte of {text.name}: its weights are damaged")
    return value
