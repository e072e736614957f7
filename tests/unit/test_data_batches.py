"""Positions to sequences, over a real HTTP server."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.core.assignment import Mixture
from spes_p2p.data.batches import TokenData
from spes_p2p.data.sources import Limits
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data, Source
from tests.unit.data_server import DataServer, serving
from tests.unit.data_support import TOKENIZER_JSON, cached, data, jsonl, npy, shard, text_tokens

LENGTH = 8
LIMITS = Limits(connect_seconds=2, read_seconds=2, attempts_max=2, backoff_seconds=0.01, deadline_seconds=20)
SIZES = (3, 100, 1, 7, 64, 9)


@pytest.fixture
def server() -> Iterator[DataServer]:
    with serving(DataServer(files={"/tokenizer.json": TOKENIZER_JSON})) as started:
        yield started


@pytest.fixture
def opened(server: DataServer, tmp_path: Path) -> Iterator[Callable[..., TokenData]]:
    """Opens the data of a manifest on the server, with a cache at tmp_path/cache."""
    made: list[TokenData] = []

    def open_data(described: Data, cache_bytes_max: int = 1 << 20) -> TokenData:
        made.append(
            TokenData(
                described,
                LENGTH,
                7,
                tmp_path / "cache",
                [server.url],
                cache_bytes_max=cache_bytes_max,
                limits=LIMITS,
            )
        )
        return made[-1]

    yield open_data
    for one in made:
        one.close()


def npy_source(server: DataServer, sizes: tuple[int, ...] = SIZES, name: str = "n", dtype: str = "<u2") -> Source:
    """Puts shards of random tokens on the server."""
    generator = np.random.default_rng(len(name))
    shards = []
    for number, size in enumerate(sizes):
        body = npy(generator.integers(0, 250, size).astype(dtype))
        server.files[f"/{name}{number}.npy"] = body
        shards.append(shard(f"{server.url}/{name}{number}.npy", body, size))
    return Source(name=name, format="npy", shards=tuple(shards))


def text_source(server: DataServer, documents: list[list[str]]) -> Source:
    shards = []
    for number, texts in enumerate(documents):
        body = jsonl(*texts)
        server.files[f"/t{number}.jsonl"] = body
        shards.append(shard(f"{server.url}/t{number}.jsonl", body, len(text_tokens(*texts))))
    return Source(name="t", format="jsonl", shards=tuple(shards), weight=0.5)


def stream(server: DataServer, source: Source) -> np.ndarray:
    """All of a source's tokens, read in the simplest way."""
    bodies = [server.files[one.url.removeprefix(server.url)] for one in source.shards]
    return np.concatenate([np.frombuffer(body[128:], dtype="<u2").astype(np.uint32) for body in bodies])


def test_sequences_are_the_windows_the_mixture_names(server: DataServer, opened: Callable[..., TokenData]) -> None:
    texts = [["the cat", "and the hat and"], ["the bat ☃"], ["x" * 40]]
    numbers, words = npy_source(server), text_source(server, texts)
    streams = [stream(server, numbers), np.array(text_tokens(*itertools.chain(*texts)), np.uint32)]
    counts = [(len(one) - 1) // LENGTH for one in streams]
    mixture = Mixture.of(counts, [1.0, 0.5], 7)
    tokens = opened(data(server.url, server.files, numbers, words))
    positions = range(1000, 1200)
    found = tokens.sequences(positions)
    assert found.shape == (200, LENGTH + 1)
    assert found.dtype == np.uint32
    seen = set()
    for row, position in zip(found, positions, strict=True):
        source, index = mixture.locate(position)
        seen.add((source, index))
        assert row.tolist() == streams[source][index * LENGTH : index * LENGTH + LENGTH + 1].tolist()
    assert seen == {(source, index) for source in (0, 1) for index in range(counts[source])}
    # Alone or in another order, a position is the same sequence.
    assert np.array_equal(tokens.sequences(range(1050, 1040, -1)), found[50:40:-1])


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > LENGTH), st.data())
def test_pieces_of_a_window_join_to_it(sizes: list[int], draw: st.DataObject) -> None:
    """The plan of one sequence, over any division into shards, against the joined stream."""
    shards = tuple(shard(f"https://data.example.org/{k}", b"x", size) for k, size in enumerate(sizes))
    source = Source(name="n", format="npy", shards=shards)
    described = data("https://data.example.org", {"/tokenizer.json": TOKENIZER_JSON}, source)
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenData(described, LENGTH, 3, Path(folder), [], cache_bytes_max=1)
        position = draw.draw(st.integers(0, 10**9))
        needed = tokens._needed(range(position, position + 1))
    offsets = np.cumsum([0, *sizes])
    _, index = Mixture.of([(sum(sizes) - 1) // LENGTH], [1.0], 3).locate(position)
    joined = [
        offsets[number] + piece.start + k for (_, number), (piece,) in needed.items() for k in range(piece.length)
    ]
    assert joined == list(range(index * LENGTH, index * LENGTH + LENGTH + 1))
    assert all(piece.start + piece.length <= sizes[number] for (_, number), (piece,) in needed.items())


def test_only_the_shards_that_are_needed_are_fetched(server: DataServer, opened: Callable[..., TokenData]) -> None:
    tokens = opened(data(server.url, server.files, npy_source(server, (800,) * 30)))
    tokens.sequences(range(3))
    asked = {path for path, _ in server.asked}
    assert len(asked - {"/tokenizer.json"}) <= 6
    before = len(server.asked)
    tokens.sequences(range(3))
    assert len(server.asked) == before


def test_a_second_process_life_reads_the_cache_alone(server: DataServer, opened: Callable[..., TokenData]) -> None:
    described = data(
        server.url, server.files, npy_source(server), text_source(server, [["a longer text about the cat and the hat"]])
    )
    first = opened(described).sequences(range(300))
    server.files.clear()
    before = len(server.asked)
    assert np.array_equal(opened(described).sequences(range(300)), first)
    assert len(server.asked) == before


def test_a_damaged_cache_file_is_fetched_again(
    server: DataServer, opened: Callable[..., TokenData], tmp_path: Path
) -> None:
    described = data(server.url, server.files, npy_source(server, (100,)))
    first = opened(described).sequences(range(20))
    (name,) = cached(tmp_path / "cache")
    path = tmp_path / "cache" / name
    body = bytearray(path.read_bytes())
    body[-2] ^= 1
    path.write_bytes(body)
    assert np.array_equal(opened(described).sequences(range(20)), first)
    assert path.read_bytes() != body


def test_a_small_cache_gives_the_same_sequences(server: DataServer, opened: Callable[..., TokenData]) -> None:
    described = data(server.url, server.files, npy_source(server, (500,) * 10))
    expected = opened(described).sequences(range(60))
    room = len(TOKENIZER_JSON) + 2 * 1128
    tokens = opened(described, room)
    assert np.array_equal(tokens.sequences(range(60)), expected)
    assert sum(path.stat().st_size for path in tokens.tokenizer_path().parent.iterdir()) <= room


def test_a_shard_that_does_not_fit_says_how_much_is_needed(
    server: DataServer, opened: Callable[..., TokenData]
) -> None:
    tokens = opened(data(server.url, server.files, npy_source(server, (5000,))), len(TOKENIZER_JSON) + 100)
    with pytest.raises(UserError, match=f"allow at least {len(TOKENIZER_JSON) + 10_128} bytes"):
        tokens.sequences(range(1))


def test_prefetched_shards_need_no_further_request(server: DataServer, opened: Callable[..., TokenData]) -> None:
    described = data(
        server.url, server.files, npy_source(server), text_source(server, [["a longer text about the cat and the hat"]])
    )
    tokens = opened(described)
    tokens.prefetch(range(400))
    thread = tokens._prefetcher._thread
    if thread is not None:
        thread.join(20)
    before = len(server.asked)
    assert before == 1 + len(SIZES) + 1
    assert len(tokens.sequences(range(400))) == 400
    assert len(server.asked) == before


def test_prefetching_gives_way_to_what_is_needed_now(server: DataServer, opened: Callable[..., TokenData]) -> None:
    """The background holds half the cache with a shard that stalls; the foreground needs more than the other half."""
    small, large = npy_source(server, (1000,), "s"), npy_source(server, (1500,), "large")
    described = data(server.url, server.files, small, large)
    mixture = Mixture.of([999 // LENGTH, 1499 // LENGTH], [1.0, 1.0], 7)
    of_small = next(p for p in range(10_000) if mixture.locate(p)[0] == 0)
    of_large = next(p for p in range(10_000) if mixture.locate(p)[0] == 1)
    tokens = opened(described, len(TOKENIZER_JSON) + 4500)
    tokens.prepare()
    gate = server.gate = threading.Event()
    tokens.prefetch(range(of_small, of_small + 1))
    assert server.halfway.wait(10)
    server.gate = None
    timer = threading.Timer(0.0, gate.set)
    timer.start()
    assert tokens.sequences(range(of_large, of_large + 1)).shape == (1, LENGTH + 1)
    timer.join(10)


def test_a_prefetch_error_waits_for_whoever_needs_the_shard(
    server: DataServer, opened: Callable[..., TokenData]
) -> None:
    described = data(server.url, server.files, npy_source(server, (100,)))
    body = server.files.pop("/n0.npy")
    tokens = opened(described)
    tokens.prefetch(range(5))
    thread = tokens._prefetcher._thread
    if thread is not None:
        thread.join(20)
    with pytest.raises(UserError, match="no such file"):
        tokens.sequences(range(5))
    server.files["/n0.npy"] = body
    tokens.prefetch(range(5))
    assert len(tokens.sequences(range(5))) == 5


def test_closing_keeps_what_has_arrived(server: DataServer, opened: Callable[..., TokenData], tmp_path: Path) -> None:
    described = data(server.url, server.files, npy_source(server, (1_000_000,)))
    tokens = opened(described, 1 << 23)
    tokens.prepare()
    server.gate = threading.Event()
    tokens.prefetch(range(1))
    assert server.halfway.wait(10)
    timer = threading.Timer(0.05, server.gate.set)
    timer.start()
    tokens.close()
    timer.join(10)
    again = opened(described, 1 << 23)
    server.gate = None
    assert len(again.sequences(range(1))) == 1
    assert len(cached(tmp_path / "cache")) == 1


def test_heldout_is_all_of_its_tokens(server: DataServer, opened: Callable[..., TokenData]) -> None:
    bodies = [jsonl("the cat", "hat"), jsonl("and")]
    server.files.update({"/h0": bodies[0], "/h1": bodies[1]})
    counts = [len(text_tokens("the cat", "hat")), len(text_tokens("and"))]
    held = Source(
        name="h",
        format="jsonl",
        shards=tuple(shard(f"{server.url}/h{k}", bodies[k], counts[k]) for k in (0, 1)),
    )
    tokens = opened(data(server.url, server.files, npy_source(server), heldout=held))
    found = tokens.heldout()
    assert found.tolist() == text_tokens("the cat", "hat", "and")
    assert found.dtype == np.uint16


@pytest.mark.parametrize(
    ("tokens", "said", "message"),
    [
        (np.arange(100, dtype="<u2"), 101, "yields 100 tokens where the manifest says 101"),
        (np.arange(100, dtype="<i8"), 100, "holds int64"),
        (np.arange(100, dtype=">u2"), 100, "uint16 or uint32"),
        (np.zeros((10, 10), dtype="<u2"), 100, "a row of uint16"),
        (np.full(100, 300, dtype="<u2"), 100, "holds the token 300, but the manifest's tokenizer has"),
        (np.array([None] * 100, dtype=object), 100, "no .npy file"),
    ],
)
def test_unfit_token_shards(
    server: DataServer, opened: Callable[..., TokenData], tokens: np.ndarray, said: int, message: str
) -> None:
    body = npy(tokens)
    server.files["/n.npy"] = body
    source = Source(name="n", format="npy", shards=(shard(f"{server.url}/n.npy", body, said),))
    with pytest.raises(UserError, match=message) as caught:
        opened(data(server.url, server.files, source)).sequences(range(1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"no array", b"", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_token_shard(server: DataServer, opened: Callable[..., TokenData], body: bytes) -> None:
    server.files["/n.npy"] = body
    described = shard(f"{server.url}/n.npy", body or b"x", 100)
    source = Source(name="n", format="npy", shards=(described,))
    with pytest.raises(UserError):
        opened(data(server.url, server.files, source)).sequences(range(1))


def test_a_text_with_another_number_of_tokens(server: DataServer, opened: Callable[..., TokenData]) -> None:
    body = jsonl("the cat and the hat and the bat")
    server.files["/t"] = body
    for said in (12, 1000):
        source = Source(name="t", format="jsonl", shards=(shard(f"{server.url}/t", body, said),))
        with pytest.raises(UserError, match=f"where the manifest says {said}"):
            opened(data(server.url, server.files, source)).sequences(range(1))


def test_a_manifest_is_checked_before_anything_is_fetched(server: DataServer, tmp_path: Path) -> None:
    source = npy_source(server)
    described = data(server.url, server.files, source)
    with pytest.raises(UserError, match="--allow-source"):
        TokenData(described, LENGTH, 7, tmp_path / "cache", [], cache_bytes_max=1 << 20)
    with pytest.raises(UserError, match="source n has 184 tokens, fewer than one sequence"):
        TokenData(described, 184, 7, tmp_path / "cache", [server.url], cache_bytes_max=1 << 20)
    assert not server.asked
    assert not (tmp_path / "cache").exists()


def test_the_tokenizers_digest_and_eos_are_checked(server: DataServer, opened: Callable[..., TokenData]) -> None:
    described = data(server.url, server.files, npy_source(server))
    server.files["/tokenizer.json"] = b" " + TOKENIZER_JSON[1:]
    with pytest.raises(UserError, match="not the file the manifest names"):
        opened(described).prepare()
