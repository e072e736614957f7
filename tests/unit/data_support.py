"""What the data tests share: a small tokenizer and manifests of files in memory."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spes_protocols import manifest
from spes_protocols.manifest import Data, Shard, Source

EOS = 0


def byte_tokenizer(vocab_size: int = 300, texts: tuple[str, ...] = ("the cat and the hat and the bat",)) -> Tokenizer:
    """A byte-level BPE whose id 0 is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str().encode()


def npy(tokens: NDArray[np.generic]) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def text_tokens(*texts: str) -> list[int]:
    """What the documents are as tokens, said in the simplest way."""
    return [token for text in texts for token in (*TOKENIZER.encode(text).ids, EOS)]


def shard(url: str, body: bytes, tokens: int) -> Shard:
    return Shard(url=url, sha256=hashlib.sha256(body).hexdigest(), bytes=len(body), tokens=tokens)


def data(base: str, files: Mapping[str, bytes], *sources: Source, heldout: Source | None = None) -> Data:
    """A manifest's data section whose tokenizer lies at `base`/tokenizer.json."""
    held = heldout or Source(name="held", format="jsonl", shards=(shard(f"{base}/held", jsonl("the hat"), 4),))
    assert files["/tokenizer.json"] == TOKENIZER_JSON
    tokenizer = manifest.Tokenizer(
        url=f"{base}/tokenizer.json",
        sha256=hashlib.sha256(TOKENIZER_JSON).hexdigest(),
        bytes=len(TOKENIZER_JSON),
        eos_id=EOS,
    )
    return Data(sources=sources, heldout=held, heldout_bytes=100, tokenizer=tokenizer)


def cached(folder: Path) -> set[str]:
    """Names of the finished token files in a cache."""
    return {path.name for path in folder.glob("*.npy")}
