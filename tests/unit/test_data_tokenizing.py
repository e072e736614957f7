"""Text formats to tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spes_p2p.data import tokenizing
from spes_p2p.data.tokenizing import (
    describe_shard,
    documents,
    load_tokenizer,
    token_arrays,
    token_dtype,
    vocabulary_size,
    write_tokens,
)
from spes_protocols.errors import UserError
from tests.unit.data_support import EOS, TOKENIZER, TOKENIZER_JSON, byte_tokenizer, jsonl, text_tokens

TEXTS = ("the cat", "", "und der Hut ☃\n", "and the bat" * 50)


def write(path: Path, source_format: str, texts: tuple[str, ...] = TEXTS) -> Path:
    if source_format == "txt":
        path.write_bytes("".join(texts).encode())
    elif source_format == "jsonl":
        path.write_bytes(jsonl(*texts))
    else:
        table = pa.table({"other": list(range(len(texts))), "text": list(texts)})
        pq.write_table(table, path, row_group_size=3)
    return path


@pytest.mark.parametrize("source_format", ["txt", "jsonl", "parquet"])
def test_every_format_yields_its_documents_and_tokens(tmp_path: Path, source_format: str) -> None:
    path = write(tmp_path / "a", source_format)
    expected = ("".join(TEXTS),) if source_format == "txt" else TEXTS
    assert list(documents(path, source_format, "text")) == list(expected)
    found = np.concatenate(list(token_arrays(documents(path, source_format, "text"), TOKENIZER, EOS)))
    assert found.tolist() == text_tokens(*expected)
    described = describe_shard(path, "/url", source_format, "text", TOKENIZER, EOS)
    assert described.tokens == len(found)
    assert described.bytes == path.stat().st_size


def test_batches_do_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(token_arrays(TEXTS, TOKENIZER, EOS)))
    monkeypatch.setattr(tokenizing, "_BATCH_DOCUMENTS", 1)
    single = list(token_arrays(TEXTS, TOKENIZER, EOS))
    assert len(single) == len(TEXTS)
    assert np.array_equal(np.concatenate(single), whole)


def test_another_text_key_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"body": "x"}\n\n{"body": "y", "text": "z"}')
    assert list(documents(tmp_path / "a", "jsonl", "body")) == ["x", "y"]


@pytest.mark.parametrize(
    ("source_format", "body", "message"),
    [
        ("txt", b"\xff\xfe", "not UTF-8"),
        ("jsonl", b'{"text": "a"}\n{"text"', "line 2"),
        ("jsonl", b"[" * 100_000, "line 1"),
        ("jsonl", b'{"body": "a"}\n', "document 0 has no text under 'text'"),
        ("jsonl", b'["a"]\n', "no text"),
        ("jsonl", b'{"text": 3}\n', "no text"),
        ("jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
        ("jsonl", b"\xff\n", "line 1"),
        ("parquet", b"PAR1 no", "no parquet file"),
        ("parquet", b"", "no parquet file"),
    ],
)
def test_broken_files_are_one_line_errors(tmp_path: Path, source_format: str, body: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(body)
    with pytest.raises(UserError, match=message) as caught:
        list(documents(tmp_path / "a", source_format, "text", "https://data.example.org/a"))
    assert str(caught.value).startswith("https://data.example.org/a")
    assert "\n" not in str(caught.value)


def test_parquet_without_the_column_or_with_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "parquet")
    with pytest.raises(UserError, match="column 'body'"):
        list(documents(path, "parquet", "body"))
    with pytest.raises(UserError, match="no text under 'other'"):
        list(documents(path, "parquet", "other"))


@pytest.mark.parametrize("source_format", ["txt", "jsonl", "parquet"])
def test_long_documents_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_format: str) -> None:
    path = write(tmp_path / "a", source_format, ("☃" * 4,))
    monkeypatch.setattr(tokenizing, "DOCUMENT_BYTES_MAX", 12)
    assert list(documents(path, source_format, "text")) == ["☃" * 4]
    monkeypatch.setattr(tokenizing, "DOCUMENT_BYTES_MAX", 11)
    with pytest.raises(UserError, match="larger than 11 bytes; split"):
        list(documents(path, source_format, "text"))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "DOCUMENT_BYTES_MAX", 100)
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    with pytest.raises(UserError, match="larger than 100 bytes"):
        list(documents(tmp_path / "a", "jsonl", "text"))


def test_a_tokenizers_own_padding_and_truncation_are_off(tmp_path: Path) -> None:
    changed = byte_tokenizer()
    changed.enable_truncation(2)
    changed.enable_padding(length=20)
    changed.save(str(tmp_path / "t.json"))
    arrays = token_arrays(["the cat and the hat"], load_tokenizer(tmp_path / "t.json"), EOS)
    assert np.concatenate(list(arrays)).tolist() == text_tokens("the cat and the hat")


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    for body in (b"", b"{}", b"[]", TOKENIZER_JSON[:-10]):
        (tmp_path / "t.json").write_bytes(body)
        with pytest.raises(UserError, match="no tokenizer file"):
            load_tokenizer(tmp_path / "t.json")


def test_the_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(65_535) == np.uint16
    assert token_dtype(65_536) == np.uint32
    assert vocabulary_size(TOKENIZER) == TOKENIZER.get_vocab_size()


@pytest.mark.parametrize("dtype", [np.dtype("<u2"), np.dtype("<u4")])
def test_written_tokens_read_back(tmp_path: Path, dtype: np.dtype[np.uint16 | np.uint32]) -> None:
    arrays = [np.array([1, 2, 65_535], np.uint32), np.array([0], np.uint32)]
    write_tokens(arrays, tmp_path / "a.npy", 4, dtype, "a")
    found = np.load(tmp_path / "a.npy", mmap_mode="r", allow_pickle=False)
    assert found.dtype == dtype
    assert found.tolist() == [1, 2, 65_535, 0]


@pytest.mark.parametrize(("count", "message"), [(3, "more than 3 tokens"), (5, "yields 4 tokens")])
def test_another_number_of_tokens_leaves_no_file(tmp_path: Path, count: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_tokens([np.zeros(4, np.uint32)], tmp_path / "a.npy", count, np.dtype("<u2"), "a")
    assert not (tmp_path / "a.npy").exists()
