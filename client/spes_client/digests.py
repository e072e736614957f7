"""What a data file is: digest, size and token count, for the organizer who writes or checks a manifest.

Reads any address that fsspec can open. These are the organizer's own addresses, so none is refused; the checks on a
manifest that came from a peer are in `spes_p2p.data.sources`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from spes_protocols.errors import NetworkError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMATS = ("npy", "txt", "jsonl", "parquet")

_BLOCK_BYTES = 1 << 20
_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

Report = Callable[[str, float], None]
"""Progress for a person: what is being done, and the fraction of it that is done."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer and the id of the token that closes a document."""

    tokenizer: Tokenizer
    eos_id: int


def absolute(url: str) -> str:
    """An address as a manifest carries it: paths absolute, URLs as they are."""
    return url if "://" in url else str(Path(url).expanduser().absolute())


def digest_of(url: str, report: Report, copy: BinaryIO | None = None) -> tuple[str, int]:
    """(SHA-256 in hexadecimal, size in bytes) of what is at `url`; its bytes also go to `copy`.

    Raises `UserError` for a file that cannot be read, `NetworkError` for an address.
    """
    hasher, size = hashlib.sha256(), 0
    with _opened(url) as (file, total):
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
            if copy is not None:
                copy.write(block)
            report(f"reading {url}", size / total if total else 0.0)
    return hasher.hexdigest(), size


@contextlib.contextmanager
def _opened(url: str) -> Iterator[tuple[Any, int]]:
    """(open file, its size or 0) at a path or URL."""
    import aiohttp
    import fsspec

    try:
        if "://" not in url:
            with Path(url).open("rb") as file:
                yield file, Path(url).stat().st_size
            return
        with fsspec.open(url, "rb") as file:
            yield file, getattr(file, "size", None) or 0
    except ImportError as error:
        raise UserError(f"cannot read {url}: {error}; install what is missing and try again") from None
    except ValueError as error:
        raise UserError(f"cannot read {url}: {error}; give a path or an https://, hf:// or s3:// address") from None
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "://" in url and not url.startswith("file://"):
            raise NetworkError(f"cannot read {url}: {cause}; check the address and try again") from None
        raise UserError(f"cannot read {url}: {cause}; check the path") from None


def describe_tokenizer(url: str, eos_token: str, folder: Path, report: Report) -> tuple[dict[str, Any], TokenizerFile]:
    """(the manifest's `data.tokenizer` block, the tokenizer) of a `tokenizers` JSON file.

    Without `eos_token` the usual names are looked for. Raises `UserError` when the tokenizer has none of them.
    """
    from spes_p2p.data.tokenizing import load_tokenizer

    with _local_copy(url, folder, report) as (path, sha256, size):
        tokenizer = load_tokenizer(path)
    candidates = (eos_token,) if eos_token else _EOS_TOKENS
    ids = [found for token in candidates if (found := tokenizer.token_to_id(token)) is not None]
    if not ids:
        raise UserError(f"{url} has no token {' or '.join(candidates)}; name its end token with --eos-token TEXT")
    block = {"url": absolute(url), "sha256": sha256, "bytes": size, "eos_id": ids[0]}
    return block, TokenizerFile(tokenizer, ids[0])


def describe_shard(
    url: str, source_format: str | None, text_key: str, tokenizer: TokenizerFile | None, folder: Path, report: Report
) -> tuple[dict[str, Any], int]:
    """(the manifest's block, bytes of text in UTF-8) of a data file; token files have 0 bytes of text.

    Raises `UserError` for a file that is not of its format, `NetworkError` for an address that does not answer.
    """
    from spes_p2p.data.tokenizing import documents, token_arrays

    source_format = source_format or Path(url.partition("?")[0]).suffix.removeprefix(".")
    if source_format not in FORMATS:
        raise UserError(f"cannot tell the format of {url}; name it with --format {'|'.join(FORMATS)}")
    if source_format != "npy" and tokenizer is None:
        raise UserError(f"{url} is text, whose tokens a tokenizer counts; name it with --tokenizer FILE_OR_URL")
    text_bytes = 0

    def measured(texts: Iterator[str]) -> Iterator[str]:
        nonlocal text_bytes
        for text in texts:
            text_bytes += len(text.encode())
            report(f"tokenizing {url}", min(1.0, text_bytes / size))
            yield text

    with _local_copy(url, folder, report) as (path, sha256, size):
        if tokenizer is None or source_format == "npy":
            tokens = _npy_tokens(path, url)
        else:
            texts = measured(documents(path, source_format, text_key, url))
            tokens = sum(len(array) for array in token_arrays(texts, tokenizer.tokenizer, tokenizer.eos_id))
    return {"url": absolute(url), "sha256": sha256, "bytes": size, "tokens": tokens}, text_bytes


def _npy_tokens(path: Path, url: str) -> int:
    """Tokens in a .npy file. Raises `UserError` when it is no one-dimensional array of uint16 or uint32."""
    import numpy as np

    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{url} is no .npy file: {error}; name another format with --format") from None
    if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
        raise UserError(f"{url} holds {array.dtype} of shape {array.shape}; expected one dimension of uint16 or uint32")
    return len(array)


@contextlib.contextmanager
def _local_copy(url: str, folder: Path, report: Report) -> Iterator[tuple[Path, str, int]]:
    """(local path, SHA-256, bytes) of a file; an address is read into `folder` while the context lasts."""
    if "://" not in url:
        sha256, size = digest_of(url, report)
        yield Path(url), sha256, size
        return
    path = folder / f"copy.{Path(url.partition('?')[0]).suffix.removeprefix('.') or 'bin'}"
    try:
        with path.open("wb") as copy:
            sha256, size = digest_of(url, report, copy)
        yield path, sha256, size
    finally:
        path.unlink(missing_ok=True)
