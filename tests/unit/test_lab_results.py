"""The laboratory's tables: read whole or not at all, each run trained by one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.lab import run as lab_run
from spes_p2p.lab.methods import Central
from spes_p2p.lab.results import Results
from spes_p2p.lab.run import DivergedError, Outcome, Point
from spes_p2p.lab.settings import Settings, manifest_of
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data
from tests.unit.cli_support import Spes
from tests.unit.model_support import MODEL
from tests.unit.train_support import make_data

OUTCOME = Outcome(
    bits_per_byte=2.25, sent_bytes=10, device_bytes=20, host_bytes=30, tokens=40, rounds=1,
    curve=(Point(tokens=20, bits_per_byte=2.5, loss=3.5), Point(tokens=40, bits_per_byte=2.25, loss=3.25)),
)  # fmt: skip
RUNS = [Settings(method="spes", seed=seed).normal() for seed in (0, 1)]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path)
    for settings in RUNS:
        results.add(settings, OUTCOME, 1.5)
    return results


@pytest.mark.parametrize("name", ["results.csv", "curves.csv"])
def test_a_table_that_was_cut_anywhere_is_whole_rows_or_refused(results: Results, name: str) -> None:
    path = results.folder / name
    data = path.read_bytes()
    full = (results.finished(), results.curves())
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if not data[:length].endswith(b"\n"):
            with pytest.raises(UserError, match=name):
                results.curves()
        else:
            assert all(row in full[0] for row in results.finished())
            results.curves()
    path.write_bytes(data)
    assert (results.finished(), results.curves()) == full


@pytest.mark.parametrize("name", ["results.csv", "curves.csv"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.rstrip() + b",more\n",
        lambda data: data + b"\0\n",
        lambda data: data + b'"' + b"x" * 200_000 + b'"\n',
        lambda data: data + b'"\n',
        lambda data: data.replace(b"2.25", b"much"),
        lambda data: data.replace(b"spes,nano,4,20", b"spes,nano,4,many"),
        lambda data: data + b"\xff\n",
        lambda data: b"",
    ],
    ids=["a column too many", "NUL", "a huge field", "a quote", "no figure", "no setting", "no UTF-8", "empty"],
)
def test_a_damaged_table_is_told_in_a_line(
    results: Results, name: str, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    path = results.folder / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{name} is no table of this version of the laboratory, or not all of one"):
        results.curves()
    result = Spes(capsys)("lab", "plot", "--out", results.folder, "-o", results.folder / "x.png")
    assert (result.code, name in result.error, (results.folder / "x.png").exists()) == (2, True, False)


def test_a_table_without_a_number_is_none(results: Results) -> None:
    results.path.write_text(results.path.read_text().replace("2.250000", "nan"))
    with pytest.raises(UserError, match="is no table"):
        results.finished()


def test_names_in_a_table_are_no_markup(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    results.path.write_text(results.path.read_text().replace("nano", "[/na]\x1b[31mno"))
    shown = Spes(capsys)("lab", "table", "--out", results.folder)
    assert (shown.code, "model [/na] [31mno" in shown.out, "\x1b" in shown.out) == (0, True, False)


HOLD = """
import sys
from pathlib import Path
from spes_p2p.lab.results import Results
from spes_p2p.lab.settings import Settings
with Results(Path(sys.argv[1])).claimed(Settings(method="spes", seed=7).normal(), wait=True) as is_free:
    print(is_free, flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the run of seed 7."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    return process


@pytest.mark.parametrize("killed", [False, True], ids=["done", "killed"])
def test_a_run_is_trained_by_one_process(tmp_path: Path, killed: bool) -> None:
    results = Results(tmp_path / "lab")
    run, other = (Settings(method="spes", seed=seed).normal() for seed in (7, 8))
    process = hold(results.folder)
    with results.claimed(run, wait=False) as is_free:
        assert not is_free
    with results.claimed(other, wait=False) as is_free:
        assert is_free
    if killed:
        process.kill()
    else:
        results.add(run, OUTCOME, 1.5)
    process.communicate("")
    for wait in (False, True):
        with results.claimed(run, wait=wait) as is_free:
            assert is_free == killed
    assert not list(results.folder.glob(".run-*"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def test_a_last_state_that_gives_no_number_is_no_result(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(method="central", peers=2, h=1, batch=1, tokens=2 * MODEL.sequence_length).normal()
    real = Central.round

    def spoil(self: Central, state: object, number: int) -> object:
        done = real(self, state, number)  # type: ignore[arg-type]
        done.state["lm_head.weight"][:] = np.inf  # type: ignore[index]
        return done

    monkeypatch.setattr(Central, "round", spoil)
    tokens = np.arange(MODEL.sequence_length + 1, dtype=np.uint32)
    with pytest.raises(DivergedError, match=r"the last state gives nan bits per byte; try a lower --lr"):
        lab_run.run(settings, manifest_of(settings, MODEL, data), lambda p: np.stack([tokens] * len(p)), tokens)
