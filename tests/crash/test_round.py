"""One whole round, stopped or failed at each of its effects on the disk in turn.

After every one of them a start without faults must reach the head and go on, with nothing signed twice, nothing
half-written in what others are served, and nothing left lying about.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_p2p.crypto.envelope import unseal
from spes_p2p.peer.leftovers import Leftovers, named_blobs
from spes_p2p.store import blobs, files
from spes_p2p.store.chain import Chain
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode
from spes_protocols.errors import SpesError
from spes_protocols.messages import Commit, Header
from tests.crash.faults import Faults, Kind
from tests.crash.lives import ROUNDS_BEFORE, Life, faulty, live, make_home, run_dir, said_twice

FIRST = ROUNDS_BEFORE + 1
LAST = FIRST + 1
"""The round at whose begin the faulty life ends by itself, and the one that the lives after it go on to."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every first life finds a copy of."""
    return make_home(tmp_path_factory.mktemp("run"))


def first_life(home: Path, folder: Path, kind: Kind, at: int) -> tuple[Faults, Life]:
    """One round on a copy of the home, with the fault at an effect; 0 for none."""
    shutil.copytree(home, folder / "1")
    faults = Faults(folder / "1", folder / "left", kind, at) if at else Faults(folder / "1", folder / "left")
    return faults, live(folder / "1", faults, FIRST)


def points(home: Path, folder: Path) -> list[int]:
    """The effects of a round when nothing goes wrong, by number.

    Of the many writes to one file, all before it has a name, the first and the last stand for the others.
    """
    faults, life = first_life(home, folder, Kind.STOP, 0)
    assert life.error is None
    assert len(life.sent) == 4, "header, proposal, prevote, precommit"
    assert head_round(faults.killed) == FIRST
    effects = ["", *faults.effects, ""]
    assert len(faults.effects) > 60
    return [at for at in range(1, len(effects) - 1) if not effects[at - 1] == effects[at] == effects[at + 1]]


def problems(home: Path, folder: Path, kind: Kind) -> Iterator[str]:
    """What is wrong after a fault at each effect in turn."""
    for at in points(home, folder / "0"):
        here = folder / str(at)
        faults, first = first_life(home, here, kind, at)
        for left in filter(Path.exists, (faults.killed, faults.cut)):
            try:
                check_between(left, kind, first)
                after = Faults(left, here / f"after {left.name}")
                second = live(left, after, LAST)
                check_after(after.killed, first, second)
            except (AssertionError, SpesError) as error:
                yield f"{left.name} at {at} ({faults.effects[at - 1]}): {error!r:.200}; said {first.said[-2:]}"
        shutil.rmtree(here)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower().replace("_", " "))
def test_a_round_survives_a_fault_at_every_effect(home: Path, tmp_path: Path, kind: Kind) -> None:
    found = list(problems(home, tmp_path, kind))
    assert not found, f"{len(found)} problems:\n" + "\n".join(found[:10])


def forgets_headers(patch: pytest.MonkeyPatch) -> None:
    """A header is sent and not stored."""
    patch.setattr(LedgerDB, "put_own_header", lambda self, epoch, round, raw: raw)


def syncs_no_file(patch: pytest.MonkeyPatch) -> None:
    """Files get their names before their bytes are on disk."""
    patch.setattr(files, "sync", lambda file, path: file.flush())


def syncs_no_directory(patch: pytest.MonkeyPatch) -> None:
    """Blobs and states count before their names are on disk."""

    def rename(source: Path, target: Path) -> None:
        files.disk.rename(source, target)

    for module in (files, blobs):
        patch.setattr(module, "rename_synced", rename)


def looks_for_no_leftovers(patch: pytest.MonkeyPatch) -> None:
    """Blobs whose header was not said stay for ever."""
    patch.setattr(Leftovers, "look", lambda self: None)


@pytest.mark.parametrize(
    "plant",
    [forgets_headers, syncs_no_file, syncs_no_directory, looks_for_no_leftovers],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert next(problems(home, tmp_path, Kind.STOP), None) is not None


@contextlib.contextmanager
def opened(home: Path) -> Iterator[tuple[RunDir, Chain]]:
    """A home's run and ledger, for a look at them."""
    run = run_dir(home)
    with faulty(Faults(home, home)), run.ledger() as db:
        yield run, Chain(run.manifest.record, run.run_id, db)


def head_round(home: Path) -> int:
    """The round that the ledger is before."""
    with opened(home) as (_, chain):
        return chain.head.round


def check_between(home: Path, kind: Kind, life: Life) -> None:
    """What a stop left is fit to be served; after errors that passed, the same life came to the head or said why."""
    with opened(home) as (run, chain):
        check_serves_whole(run, chain)
        if not kind.stops:
            assert life.error is not None or chain.head.round == FIRST, "stuck without an error"


def check_after(home: Path, *lives: Life) -> None:
    """The peer is at the last round's head, has kept to its word, and has left nothing half-done."""
    assert lives[-1].error is None, lives[-1].error
    assert not said_twice([raw for life in lives for raw in life.sent])
    with opened(home) as (run, chain):
        assert chain.head.round == LAST
        assert run.states().rounds()[-1] == LAST
        check_serves_whole(run, chain)
        for number in range(FIRST - 1, LAST):
            commit = chain.db.commit(number)
            assert commit is not None
            body = decode(Commit, commit).body
            assert body.value.headers == (chain.db.own_header(body.epoch, number),), "the header that was signed first"
        nameless = set(run.blobs().digests()) - named_blobs(chain, range(LAST))
        assert not nameless, f"{len(nameless)} blobs that no commit names"
    left = [path for path in run.path.rglob("*") if path.name.startswith(".")]
    left += [*run.path.rglob("*.partial"), *run.out_dir.iterdir()]
    assert not left, left


def check_serves_whole(run: RunDir, chain: Chain) -> None:
    """Whatever a peer serves from this directory is what its digest, its index and the ledger say."""
    store, states = run.blobs(), run.states()
    for digest in store.digests():
        store.verify(digest)
    for number in states.rounds():
        root = chain.root_at(number)
        assert states.verify(number) == root or root is None, f"S_{number} is not the ledger's"
    header = chain.db.own_header(chain.head.epoch, chain.head.round)
    if header is not None:
        assert all(store.has(section.blob) for section in unseal(header, Header).record.sections)
