"""Text to tokens: between a fetched text shard and the token array that `batches` cuts sequences from (SPEC 9.4).

A shard's tokens are those of its documents, one after another, each closed by `eos_id`. A document is encoded whole and
without what a tokenizer's post-processor would add, so the result depends on the text and the tokenizer alone.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spes_p2p.data.cache import publish, scratch_file
from spes_p2p.data.sources import file_digest
from spes_protocols.errors import UserError
from spes_protocols.manifest import Shard

TokenType = np.dtype[np.uint16 | np.uint32]
Tokens = NDArray[np.uint16 | np.uint32]

DOCUMENT_BYTES_MAX = 16 << 20
"""UTF-8 bytes of one document; the tokenizer needs about 25 times as much memory for it."""

TOKENIZER_BYTES_MAX = 64 << 20

_BATCH_BYTES = 2 << 20
_BATCH_DOCUMENTS = 512
_ROW_GROUP_BYTES_MAX = 2 << 30
_PARQUET_ROWS = 64


def load_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizers` JSON file, without truncation or padding. Raises `UserError` when it is none."""
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"{path} is no tokenizer file of the `tokenizers` library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id the tokenizer can yield."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)


def token_dtype(vocab_size: int) -> TokenType:
    """How tokens are kept: uint16 when the vocabulary has fewer than 65 536 entries, else uint32."""
    return np.dtype("<u2") if vocab_size < 65_536 else np.dtype("<u4")


def documents(path: Path, source_format: str, text_key: str, name: str = "") -> Iterator[str]:
    """The documents of a text file in order: `txt` is one, `jsonl` one a line, `parquet` one a row.

    `name` is what errors call the file. Raises `UserError` for a file that is not of its format, or whose documents
    are not text under `text_key` of at most `DOCUMENT_BYTES_MAX` bytes.
    """
    name = name or os.fspath(path)
    if source_format == "txt":
        texts = _whole(path, name)
    elif source_format == "jsonl":
        texts = _json_lines(path, text_key, name)
    else:
        assert source_format == "parquet", source_format
        texts = _parquet_rows(path, text_key, name)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}: document {number} has no text under {text_key!r}; set the source's text_key")
        if _utf8_size(text, name, number) > DOCUMENT_BYTES_MAX:
            raise _too_long(name, number)
        yield text


def _whole(path: Path, name: str) -> Iterator[object]:
    if path.stat().st_size > DOCUMENT_BYTES_MAX:
        raise _too_long(name, 0)
    try:
        yield path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def _json_lines(path: Path, text_key: str, name: str) -> Iterator[object]:
    line_bytes_max = 6 * DOCUMENT_BYTES_MAX  # JSON may write each byte as \u00xx
    with path.open("rb") as file:
        for number, line in enumerate(iter(functools.partial(file.readline, line_bytes_max), b"")):
            if not line.strip():
                continue
            if len(line) == line_bytes_max:
                raise _too_long(name, number)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{name} is not JSON lines: line {number + 1}: {error}") from None
            yield record.get(text_key) if isinstance(record, dict) else None


def _parquet_rows(path: Path, text_key: str, name: str) -> Iterator[object]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(file.metadata.num_row_groups):
                if file.metadata.row_group(group).total_byte_size > _ROW_GROUP_BYTES_MAX:
                    raise UserError(f"{name}: row group {group} is larger than 2 GiB; write smaller row groups")
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key], use_threads=False):
                yield from batch.column(text_key).to_pylist()
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{name} is no parquet file with a column {text_key!r}: {cause}") from None


def _utf8_size(text: str, name: str, number: int) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise UserError(f"{name}: document {number} has half a surrogate pair, which is no text; clean it") from None


def _too_long(name: str, number: int) -> UserError:
    return UserError(f"{name}: document {number} is larger than {DOCUMENT_BYTES_MAX} bytes; split it into several")


def token_arrays(texts: Iterable[str], tokenizer: Tokenizer, eos_id: int) -> Iterator[NDArray[np.uint32]]:
    """The tokens of documents in order, each closed by `eos_id`, a batch of documents at a time, as uint32."""
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield np.concatenate([np.array([*encoding.ids, eos_id], dtype=np.uint32) for encoding in encodings])


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def write_tokens(
    arrays: Iterable[NDArray[np.uint32]],
    path: Path,
    count: int,
    dtype: TokenType,
    name: str,
) -> None:
    """Write exactly `count` tokens as a one-dimensional .npy file, in one step at the end.

    Raises `UserError` naming `name` when there are more or fewer.
    """
    with scratch_file(path) as file:
        file.write(npy_header(count, dtype))
        found = 0
        for array in arrays:
            found += len(array)
            if found > count:
                raise wrong_count(name, f"more than {count}", count)
            file.write(array.astype(dtype).tobytes())
        if found != count:
            raise wrong_count(name, found, count)
        file.flush()
        publish(Path(file.name), path)


def npy_header(count: int, dtype: TokenType) -> bytes:
    """The bytes of a .npy file before `count` tokens."""
    header = io.BytesIO()
    shape = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, shape)
    return header.getvalue()


def wrong_count(name: str, found: object, count: int) -> UserError:
    """The error for a shard whose number of tokens is not the manifest's."""
    return UserError(
        f"{name} yields {found} tokens where the manifest says {count}; ask the organizer for a corrected manifest"
    )


def describe_shard(path: Path, url: str, source_format: str, text_key: str, tokenizer: Tokenizer, eos_id: int) -> Shard:
    """What a manifest says of the text file `path` that peers will find at `url`: digest, bytes, tokens."""
    texts = documents(path, source_format, text_key)
    tokens = sum(len(array) for array in token_arrays(texts, tokenizer, eos_id))
    return Shard(url=url, sha256=file_digest(path), bytes=path.stat().st_size, tokens=tokens)
