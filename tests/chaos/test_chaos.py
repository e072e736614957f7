"""A minute of chaos with real processes, and what the account of it has to notice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from spes_p2p.net.launch import launch
from tests.chaos.account import CALM, CHAOS, SETTLING, Account
from tests.e2e.swarm import ROOT

LAST_LINE = re.compile(r"chaos: (\d+) kills, (\d+) rounds, 0 lost, stall \d+ s, speed \d+ %")


def test_a_run_outlives_random_faults(tmp_path: Path) -> None:
    # The program that a person runs, and killed with this one. The seed is of a minute with kills of every kind, the
    # death of a bootstrap, a full disk and a split.
    command = [
        sys.executable, "-m", "tests.chaos", "--peers", "4", "--minutes", "1", "--calm-seconds", "5", "--seed", "156",
        "--kill-seconds", "9", "11", "--dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(launch(command), cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert last is not None, done.stdout
    assert int(last[1]) >= 1
    assert int(last[2]) >= 1


def account() -> Account:
    return Account(peers=4, seed=0, caged=False)


def test_speed_and_stall_are_those_of_their_phases() -> None:
    book = account()
    assert book.commit(0, "s0", 100, 5.0)  # before anything is measured
    book.begin(CALM, 10.0)
    for number in range(1, 5):
        assert book.commit(number, f"s{number}", 100, 10.0 + number)
        assert not book.commit(number, f"s{number}", 100, 10.5 + number)  # another peer prints it too
    book.begin(CHAOS, 14.0)
    book.commit(5, "s5", 100, 16.0)
    book.commit(6, "s6", 100, 21.0)
    book.begin(SETTLING, 22.0)
    book.commit(7, "s7", 100, 29.0)
    book.begin("", 30.0)
    assert book.per_second(CALM) == 100.0
    assert book.per_second(CHAOS) == 25.0
    book.kills["all"] += 3
    assert book.last_line() == "chaos: 3 kills, 2 rounds, 0 lost, stall 8 s, speed 25 %"


def test_a_stall_that_nothing_ends_counts() -> None:
    book = account()
    book.begin(CHAOS, 0.0)
    book.begin("", 50.0)
    assert book.stall_seconds == 50.0


def test_commits_that_the_final_ledger_lacks_are_lost() -> None:
    book = account()
    book.commit(3, "s4", 100, 1.0)
    book.commit(4, "s5", 100, 2.0)
    book.durable(4, b"id of 4")
    book.durable(5, b"id of 5")
    assert book.settle_with([(3, "s4"), (4, "s5")], [b"id of 3", b"id of 4", b"id of 5"]) == []
    assert book.lost == 0
    lost = book.settle_with([(3, "s4"), (4, "other")], [b"id of 3", b"other"])
    assert [re.search(r"round (\d+)", line)[1] for line in lost] == ["4", "5"]
    assert book.lost == 2


def test_an_account_is_gone_on_with(tmp_path: Path) -> None:
    book = account()
    book.begin(CALM, 0.0)
    book.commit(0, "s1", 100, 1.0)
    book.kills["peer"] += 2
    book.durable(0, b"id")
    book.problem("one")
    book.problem("one")
    book.begin("", 2.0)
    book.save(tmp_path / "account.json")
    again = Account.load(tmp_path / "account.json")
    assert (again.tokens, again.rounds, again.seconds) == (book.tokens, book.rounds, book.seconds)
    assert again.per_second(CALM) == 50.0
    assert again.on_disk == book.on_disk
    assert not again.commit(0, "s1", 100, 3.0)
    assert again.kill_count == 2
    assert again.problems == ["one"]
