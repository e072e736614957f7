"""From positions of the run's stream to sequences of tokens: what the trainer reads its batches from (SPEC 9).

`core.assignment.Mixture` says which sequence of which source a position is. A source is one stream of tokens, its
shards joined in the manifest's order; its sequence k is the `sequence_length + 1` tokens from `k * sequence_length` on
(inputs and targets, one shifted against the other), across shards where it must. Shards are fetched when a sequence
needs them, verified before their first use, and read through memory maps, so memory holds the sequences alone.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spes_p2p.core.assignment import Mixture
from spes_p2p.data.cache import Cache, CacheFullError, publish
from spes_p2p.data.sources import Fetcher, Limits, Report, StoppedError, check_url_form, file_digest
from spes_p2p.data.tokenizing import (
    TOKENIZER_BYTES_MAX,
    Tokens,
    documents,
    load_tokenizer,
    npy_header,
    token_arrays,
    token_dtype,
    vocabulary_size,
    write_tokens,
    wrong_count,
)
from spes_protocols.codec import pack, sha256
from spes_protocols.errors import SpesError, UserError
from spes_protocols.manifest import Data, Shard, Source

HELDOUT_TOKENS_MAX = 1 << 27

_CHECK_TOKENS = 1 << 20
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class _Piece:
    """`length` tokens from `start` on of one shard, which belong at `column` of row `row`."""

    row: int
    column: int
    start: int
    length: int


class TokenData:
    """The run's data at one peer. `sequences` and `heldout` are for one thread; `prefetch` works in its own."""

    def __init__(
        self,
        data: Data,
        sequence_length: int,
        seed: int,
        cache_dir: Path,
        allow_sources: Sequence[str],
        *,
        cache_bytes_max: int,
        report: Report = lambda what, fraction: None,
        limits: Limits | None = None,
    ) -> None:
        """`report` hears progress (what, fraction done), from the prefetching thread too.

        Raises `UserError` for a URL that may not be read, or a source shorter than one sequence.
        """
        shards = [shard for source in (*data.sources, data.heldout) for shard in source.shards]
        for url in (data.tokenizer.url, *(shard.url for shard in shards)):
            check_url_form(url, allow_sources)
        for source in data.sources:
            if source.tokens <= sequence_length:
                raise UserError(
                    f"source {source.name} has {source.tokens} tokens, fewer than one sequence of {sequence_length} + 1"
                )
        self._data = data
        self._length = sequence_length
        counts = [(source.tokens - 1) // sequence_length for source in data.sources]
        self._mixture = Mixture.of(counts, [source.weight for source in data.sources], seed)
        self._ends = [list(itertools.accumulate(s.tokens for s in source.shards)) for source in data.sources]
        self._cache = Cache(cache_dir, cache_bytes_max)
        self._fetcher = Fetcher(allow=tuple(allow_sources), report=report, limits=limits or Limits())
        self._verified: set[str] = set()
        self._held = ExitStack()
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_path = cache_dir / f"{data.tokenizer.sha256}.json"
        self._vocab_size = 0
        self._prefetcher = _Prefetcher(self._prefetch_shard)

    def prepare(self) -> None:
        """Fetch and open the tokenizer, which stays in the cache until `close`. Raises `UserError`."""
        if self._tokenizer is not None:
            return
        record = self._data.tokenizer
        if record.bytes > TOKENIZER_BYTES_MAX:
            raise UserError(
                f"the manifest's tokenizer has {record.bytes} bytes; at most {TOKENIZER_BYTES_MAX} are read"
            )

        def make(part: Path, path: Path) -> None:
            self._fetcher.fetch(part, record.url, record.sha256, record.bytes)
            publish(part, path)

        name = self._tokenizer_path.name
        path = self._held.enter_context(self._cache.hold(name, record.bytes, make))
        if file_digest(path) != record.sha256:
            raise UserError(f"{path} was changed since it was fetched: delete it and start again")
        tokenizer = load_tokenizer(path)
        self._vocab_size = vocabulary_size(tokenizer)
        if record.eos_id >= self._vocab_size:
            raise UserError(f"the manifest's eos_id {record.eos_id} is no token of its tokenizer ({self._vocab_size})")
        self._tokenizer = tokenizer

    def tokenizer_path(self) -> Path:
        """The tokenizer's file, after `prepare`."""
        self.prepare()
        return self._tokenizer_path

    def sequences(self, positions: range) -> NDArray[np.uint32]:
        """The sequences at `positions` of the run's stream, in their order: (n, sequence_length + 1) tokens.

        Fetches the shards they need that are not in the cache, and no others. Raises `UserError`.
        """
        rows = np.empty((len(positions), self._length + 1), dtype=np.uint32)
        for (source, number), pieces in self._needed(positions).items():
            with self._tokens(self._data.sources[source], self._data.sources[source].shards[number]) as shard:
                for piece in pieces:
                    columns = slice(piece.column, piece.column + piece.length)
                    rows[piece.row, columns] = shard[piece.start : piece.start + piece.length]
        return rows

    def prefetch(self, positions: range) -> None:
        """Begin to fetch what `sequences(positions)` will need, in the background; replaces an earlier wish.

        Only as many shards as half the cache holds are fetched ahead. An error waits until `sequences` meets it.
        """
        self.prepare()
        wanted: list[tuple[Source, Shard]] = []
        room = self._cache.bytes_max // 2
        for source_number, number in self._needed(positions):
            source = self._data.sources[source_number]
            room -= self._bytes_needed(source, source.shards[number])
            if room < 0:
                break
            wanted.append((source, source.shards[number]))
        self._prefetcher.want(wanted)

    def heldout(self) -> Tokens:
        """The held-out tokens, all of them in memory. Raises `UserError`."""
        heldout = self._data.heldout
        if heldout.tokens > HELDOUT_TOKENS_MAX:
            raise UserError(f"the held-out source has {heldout.tokens} tokens; at most {HELDOUT_TOKENS_MAX} are read")
        arrays: list[Tokens] = []
        for shard in heldout.shards:
            with self._tokens(heldout, shard) as tokens:
                arrays.append(np.array(tokens))
        return np.concatenate(arrays)

    def close(self) -> None:
        """End prefetching (what has arrived is kept) and let go of the tokenizer's file."""
        self._prefetcher.end()
        self._held.close()
        self._tokenizer = None

    def _needed(self, positions: range) -> dict[tuple[int, int], list[_Piece]]:
        """The pieces of the sequences at `positions` by (source, shard number), in order of first need."""
        needed: dict[tuple[int, int], list[_Piece]] = {}
        for row, position in enumerate(positions):
            source, index = self._mixture.locate(position)
            ends = self._ends[source]
            token, column = index * self._length, 0
            while column <= self._length:
                number = bisect_right(ends, token)
                first = ends[number - 1] if number else 0
                length = min(ends[number] - token, self._length + 1 - column)
                needed.setdefault((source, number), []).append(_Piece(row, column, token - first, length))
                token, column = token + length, column + length
        return needed

    def _prefetch_shard(self, source: Source, shard: Shard, stop: threading.Event) -> None:
        with self._shard(source, shard, replace(self._fetcher, stop=stop)):
            pass

    @contextmanager
    def _tokens(self, source: Source, shard: Shard) -> Iterator[Tokens]:
        """A shard's tokens as a memory map, verified; if the cache is too full for it, prefetching gives way."""
        self.prepare()
        with ExitStack() as stack:
            try:
                path = stack.enter_context(self._shard(source, shard, self._fetcher))
            except CacheFullError:
                self._prefetcher.end()
                path = stack.enter_context(self._shard(source, shard, self._fetcher))
            yield _open_tokens(path, shard)

    @contextmanager
    def _shard(self, source: Source, shard: Shard, fetcher: Fetcher) -> Iterator[Path]:
        """A shard's token file in the cache, fetched and tokenized as needed, verified once in this process."""
        name = self._name(source, shard)

        def make(part: Path, path: Path) -> None:
            fetcher.fetch(part, shard.url, shard.sha256, shard.bytes)
            if source.format == "npy":
                _check_tokens(part, shard, self._vocab_size)
                publish(part, path)
            else:
                self._tokenize(source, shard, part, path, fetcher)
                part.unlink()
            self._verified.add(name)

        for _ in range(2):
            with self._cache.hold(name, self._bytes_needed(source, shard), make) as path:
                if name not in self._verified and not self._is_whole(source, shard, path):
                    path.unlink()
                    continue
                self._verified.add(name)
                yield path
                return
        raise UserError(f"{name} in the data cache changes while it is used: leave that directory to this program")

    def _tokenize(self, source: Source, shard: Shard, text: Path, path: Path, fetcher: Fetcher) -> None:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        texts = documents(text, source.format, source.text_key, shard.url)
        dtype = token_dtype(self._vocab_size)

        def arrays() -> Iterator[NDArray[np.uint32]]:
            done = 0
            for array in token_arrays(texts, tokenizer, self._data.tokenizer.eos_id):
                if fetcher.stop.is_set():
                    raise StoppedError
                done += len(array)
                fetcher.report(f"tokenizing {source.name}", min(done / shard.tokens, 1.0))
                yield array

        write_tokens(arrays(), path, shard.tokens, dtype, shard.url)

    def _name(self, source: Source, shard: Shard) -> str:
        """The cache's name of a shard's tokens: the digest of all they follow from."""
        if source.format == "npy":
            return f"{shard.sha256}.npy"
        tokenizer = self._data.tokenizer
        recipe = ["tokens/1", source.format, source.text_key, shard.sha256, tokenizer.sha256, tokenizer.eos_id]
        return f"{sha256(pack(recipe)).hex()}.npy"

    def _bytes_needed(self, source: Source, shard: Shard) -> int:
        """Room in the cache while a shard is made: the file itself, and beside a text its tokens."""
        return shard.bytes if source.format == "npy" else shard.bytes + self._token_bytes(shard)

    def _token_bytes(self, shard: Shard) -> int:
        dtype = token_dtype(self._vocab_size)
        return len(npy_header(shard.tokens, dtype)) + shard.tokens * dtype.itemsize

    def _is_whole(self, source: Source, shard: Shard, path: Path) -> bool:
        """Whether a file from an earlier process is what its name says; tokens of a text by their size alone."""
        if source.format == "npy":
            return path.stat().st_size == shard.bytes and file_digest(path) == shard.sha256
        return path.stat().st_size == self._token_bytes(shard)


class _Prefetcher:
    """A background thread that gets the wanted shards one by one; it lives while there are any."""

    def __init__(self, get: Callable[[Source, Shard, threading.Event], None]) -> None:
        self._get = get
        self._mutex = threading.Lock()
        self._wanted: deque[tuple[Source, Shard]] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def want(self, wanted: Sequence[tuple[Source, Shard]]) -> None:
        """Replace what is still wanted; the shard that is being fetched is finished first."""
        with self._mutex:
            self._wanted = deque(wanted)
            if wanted and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Stop at the next block of the shard being fetched, and wait for it."""
        with self._mutex:
            thread = self._thread
            self._wanted.clear()
        if thread is not None:
            self._stop.set()
            thread.join(_STOP_SECONDS)
            self._stop.clear()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._wanted:
                    self._thread = None
                    return
                source, shard = self._wanted.popleft()
            try:
                self._get(source, shard, self._stop)
            except (SpesError, StoppedError):
                with self._mutex:  # nobody waits for this; whoever needs the shard meets the same error
                    self._wanted.clear()


def _open_tokens(path: Path, shard: Shard) -> Tokens:
    """A .npy file of tokens as a read-only memory map. Raises `UserError` when it is none of `shard.tokens` tokens."""
    try:
        tokens: Tokens = np.lib.format.open_memmap(path, mode="r")  # refuses Python objects
    except (ValueError, OSError) as error:
        raise UserError(f"{shard.url} is no .npy file: {' '.join(str(error).split())}") from None
    if tokens.ndim != 1 or tokens.dtype not in (np.dtype("<u2"), np.dtype("<u4")):
        raise UserError(f"{shard.url} holds {tokens.dtype} {tokens.shape}: a row of uint16 or uint32 tokens is needed")
    if len(tokens) != shard.tokens:
        raise wrong_count(shard.url, len(tokens), shard.tokens)
    return tokens


def _check_tokens(path: Path, shard: Shard, vocab_size: int) -> None:
    tokens = _open_tokens(path, shard)
    for start in range(0, len(tokens), _CHECK_TOKENS):
        largest = int(tokens[start : start + _CHECK_TOKENS].max())
        if largest >= vocab_size:
            raise UserError(
                f"{shard.url} holds the token {largest}, but the manifest's tokenizer has {vocab_size}: "
                "ask the organizer for the right tokenizer"
            )
