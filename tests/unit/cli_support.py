"""Shared by the tests of the commands: run `spes` in this process, and make small but complete manifests."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_client.main import main
from spes_client.manifest_toml import render
from spes_client.measured import Rates
from spes_client.presets import new_manifest

RATES = Rates(
    device="cpu", device_name="cpu", threads=1, matmul_flops=1e11, adamw_elements=1e9, apply_bytes=4e8,
    disk_write_bytes=1e8, disk_read_bytes=1e9, fsync_seconds=0.01, hash_bytes=4e8,
)  # fmt: skip
"""What `spes bench` might have measured."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error; that it is one line, with nothing on stdout, is checked here."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


class Spes:
    """`spes` as a function, with a home of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> Result:
        self._capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = self._capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)


def shard(path: Path, tokens: int) -> dict[str, Any]:
    """Write a token file and describe it as a manifest does."""
    np.save(path, np.arange(tokens, dtype=np.uint16))
    data = path.read_bytes()
    return {"url": str(path), "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "tokens": tokens}


def complete(folder: Path) -> dict[str, Any]:
    """The tiny preset with data files in `folder`, smaller still."""
    plain = new_manifest("tiny", name="test run", seed=7)
    plain["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    tokenizer = folder / "vocabulary.json"
    tokenizer.write_text("{}")
    plain["data"] = {
        "sources": [{"name": "train", "format": "npy", "shards": [shard(folder / "train.npy", 300)]}],
        "heldout": {"name": "heldout", "format": "npy", "shards": [shard(folder / "heldout.npy", 200)]},
        "heldout_bytes": 400,
        "tokenizer": {
            "url": str(tokenizer),
            "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
            "bytes": 2,
            "eos_id": 0,
        },
    }
    return plain


def write_toml(folder: Path, plain: dict[str, Any]) -> Path:
    """The manifest as `folder/run.toml`."""
    path = folder / "run.toml"
    path.write_text(render(plain))
    return path
