"""`spes doctor`: what is judged of made-up findings, what is to be typed next, and how it is shown."""

import argparse
import ast
import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from spes_bootstrap import main as bootstrap
from spes_client import doctor_judge, doctor_judge_home, doctor_judge_reach, doctor_judge_second, join, main
from spes_client.doctor import as_plain, lines, summary
from spes_client.doctor_findings import (
    GIVEN,
    AddressFound,
    RelayFound,
)
from spes_client.doctor_judge import judge
from spes_client.doctor_rows import CHECKS, Maker, Row
from spes_protocols.manifest import Manifest
from tests.unit.doctor_support import (
    ADA,
    CASES,
    Change,
    at_home,
    both,
    changed,
    flagged,
    found_in,
    healthy,
    make_manifest,
    on_net,
    running,
    to_peer,
    unreached,
    with_addresses,
    without_run,
)  # fmt: skip


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_manifest(tmp_path_factory.mktemp("data"))


def test_nothing_is_wrong_where_nothing_is(manifest: Manifest) -> None:
    rows = judge(healthy(manifest))
    not_ok = [row for row in rows if row.state != "ok"]
    assert not not_ok
    names = [row.what for row in rows]
    assert names[:6] == ["program", "run", "peer here", "identity", "identity backup", "ledger"]
    assert {"open files", "disk", "memory and card", "network daemon", "own address", "clock"} <= set(names)
    assert "direct, a call takes 20 ms, 32 Mbit/s down (4.00 MB), 16 Mbit/s up (2.00 MB)" in found_in(rows, "peer …")


@pytest.mark.parametrize(
    ("what", "state", "change", "words", "typed"), CASES, ids=[f"{case[0]}-{case[1]}-{case[3][:24]}" for case in CASES]
)
def test_what_is_judged(manifest: Manifest, what: str, state: str, change: Change, words: str, typed: str) -> None:
    found = healthy(manifest)
    change(found)
    rows = judge(found)
    about = [row for row in rows if row.what == what or row.what.startswith(f"{what} ")]
    if what == "clock":
        about = [row for row in rows if row.what == "clock"]
    hits = [row for row in about if row.state == state and words in f"{row.found} {row.cause}".replace("\n", " ")]
    assert hits, about
    assert all(typed in row.advice for row in hits), hits
    for row in rows:
        assert (row.state == "ok") == (not row.cause) == (not row.advice)


def test_a_row_that_is_not_well_must_say_why_and_what_next() -> None:
    with pytest.raises(AssertionError):
        Row(what="disk", state="problem", found="full", cause="", advice="")
    with pytest.raises(AssertionError):
        Row(what="disk", state="ok", found="free", cause="x", advice="y")


def test_lines_for_a_pipe_carry_no_control_characters(manifest: Manifest) -> None:
    found = healthy(manifest)
    found.addresses = [AddressFound(text="bad \x1b[2J", source=GIVEN, problem="evil \x1b[31m\nnews")]
    rows = judge(found)
    shown = lines(rows)
    assert all(line.isprintable() for line in shown)
    at = next(number for number, line in enumerate(shown) if line.startswith("problem  given"))
    assert shown[at + 1].split() == ["why:", "evil", "[31m", "news"]
    assert shown[at + 2].split()[0] == "next:"
    assert summary(rows, 3.2) == f"{len(rows)} things checked in 3 s: 1 problem, 0 warnings, 0 unknown"


def test_scripts_get_the_rows_and_the_figures(manifest: Manifest) -> None:
    found = healthy(manifest)
    plain = as_plain(found, judge(found))
    assert plain["counts"] == {"ok": len(plain["rows"]), "warning": 0, "problem": 0, "unknown": 0}
    assert plain["peers"][0] == {
        "peer": ADA, "role": "bootstrap", "round": 0, "path": "direct", "call_seconds": 0.02,
        "clock_offset_seconds": 0.1, "download_bytes_per_second": 4e6, "upload_bytes_per_second": 2e6,
    }  # fmt: skip
    assert plain["network"] == {
        "local": "1.1.1.1", "observed": [], "reached": "public", "download_bytes_per_second": 4e6,
        "upload_bytes_per_second": 2e6, "max_download_bytes_per_second": None, "max_upload_bytes_per_second": None,
    }  # fmt: skip
    text = (Path(__file__).parents[2] / "docs/network.md").read_text("utf-8")
    for part in (plain, plain["rows"][0], plain["machine"], plain["network"], plain["peers"][0]):
        assert not [key for key in part if f"`{key}`" not in text]
    assert not [name for name in CHECKS if f"| {name}" not in text and f", {name}" not in text]
    json.dumps({**plain, "dir": str(plain["dir"])})


# ---- what is tried --------------------------------------------------------------------------------------------------


# ---- what is to be typed ---------------------------------------------------------------------------------------------

STANDS_FOR = {
    "ADDRESS": f"/ip4/203.0.113.7/tcp/4001/p2p/{ADA}", "PORT": "4001", "FILE": "backup", "BACKUP": "backup",
    "DIRECTORY": "/elsewhere", "NAME": "example.org",
}  # fmt: skip
SYSTEMS = {"chmod", "df", "getent", "ip", "kill", "ls", "mv", "nvidia-smi", "ss", "sudo", "ulimit"}
OURS = {"spes": main.build_parser, "spes-join": join.build_parser, "spes-bootstrap": bootstrap.build_parser}
JUDGES = (doctor_judge, doctor_judge_home, doctor_judge_reach, doctor_judge_second)
MAKERS = ("warn", "bad", "unclear")


@functools.cache
def parser_of(program: str) -> argparse.ArgumentParser:
    return OURS[program]()


@functools.cache
def parsed(line: str) -> None:
    """A command line as the program's own parser takes it; of those of the system the name alone is looked at."""
    for command in re.sub("|".join(STANDS_FOR), lambda found: STANDS_FOR[found[0]], line).split(" && "):
        program, *words = shlex.split(command)
        if program in OURS:
            parser_of(program).parse_args(words)
        else:
            assert program in SYSTEMS, line


def commands(advice: str) -> list[str]:
    """What is to be typed: the end of an advice, and what stands in brackets."""
    inside = [text for found in re.findall(r"\(([^()]*)\)", advice) for text in found.split(", or ")]
    return [advice.rpartition(": ")[2], *(text for text in inside if text.partition(" ")[0] in SYSTEMS)]


HARD = [
    both(flagged("--no-port-map", None), on_net(daemon_seconds=None)),
    both(flagged("--groups", "2"), at_home(running=running(waiting="for 2 owners"))),
    both(flagged("--max-up", "10mbit,23:00-07:00=none"), on_net(relays=[RelayFound(address="r x", asked=True)])),
    with_addresses(unreached("gone", text="/dns4/it's me; rm -rf /tcp/1")),
    both(without_run, to_peer(clock_offset=None), lambda found: changed(found, is_default_home=True)),
]
"""Beside `CASES`: flags and addresses with blanks and quotes, and the default home."""


def test_what_is_to_be_typed_works_as_it_stands(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that makes a row which is not ok is come by, and its command is one."""
    seen: set[tuple[str, int]] = set()

    def noting(make: Maker) -> Maker:
        def noted(*words: str) -> Row:
            frame = sys._getframe(1)
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return make(*words)

        return noted

    for module in JUDGES:
        for name in set(MAKERS) & set(vars(module)):
            monkeypatch.setattr(module, name, noting(getattr(module, name)))
    for change in [case[2] for case in CASES] + HARD:
        found = healthy(manifest)
        change(found)
        for row in judge(found):
            assert row.check in CHECKS
            if row.state != "ok":
                assert row.command == commands(row.advice)[0]
            for line in commands(row.advice) if row.advice else ():
                parsed(line)
    for path in [str(module.__file__) for module in JUDGES]:
        calls = [node for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id in (*MAKERS, "sad", "make"):
                its_lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
                assert [line for at, line in seen if at == path and line in its_lines], f"{path}:{call.lineno}"
