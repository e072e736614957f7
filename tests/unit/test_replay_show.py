"""`spes-replay show`: what the ledger says of each round, with norms where the blobs are."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from spes_client import replay_tables
from spes_client.replay import main
from spes_p2p.core.tensors import section_specs
from spes_p2p.delta.codecs import decode_section, norm_squared
from spes_p2p.replay.show import rows
from spes_protocols.errors import IntegrityError
from tests.unit.log_support import (
    ADA,
    BOB,
    EVE,
    MODEL,
    ORGANIZER,
    RunLog,
    copy_log,
    flip,
    flip_file,
    play,
    records,
    rewrite_record,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = play(tmp_path_factory.mktemp("played"))
    log.close()
    return log


def test_the_rows_are_the_ledger(played: RunLog) -> None:
    found = list(rows(played.run))
    assert [(row.kind, row.round) for row in found] == [("start", 0), *(("commit", r) for r in range(5))]
    assert found[0].signer == ORGANIZER.peer_id
    assert [set(row.members) for row in found[:3]] == [
        {ADA.peer_id, BOB.peer_id},
        {ADA.peer_id, BOB.peer_id},
        {ADA.peer_id, BOB.peer_id, EVE.peer_id},
    ]
    assert sorted(g for groups in found[1].members.values() for g in groups) == [0, 1]
    assert found[1].claims == (EVE.peer_id,)
    assert [[g.refused for g in row.given if g.refused] for row in found[3:]] == [["finite"], ["norm"], ["sections"]]
    assert {(row.votes, row.votes_total, row.view) for row in found[1:]} == {(2, 2, 0)}
    assert found[-1].state_root == played.chain.head.state_root


def test_figures_are_sums_over_what_counted(played: RunLog) -> None:
    row = next(iter(rows(played.run, only_round=3)))
    counted = [g for g in row.given if not g.refused]
    assert len(counted) == 2
    assert row.tokens == sum(g.tokens for g in counted)
    assert row.loss == pytest.approx(sum(g.loss * g.tokens for g in counted) / row.tokens, rel=1e-12)
    assert row.bytes == sum(part.bytes for g in row.given for part in g.parts)


def test_norms_are_those_of_the_decoded_blobs(played: RunLog) -> None:
    row = next(iter(rows(played.run, only_round=2)))
    for given in row.given:
        for part in given.parts:
            if given.refused:
                assert part.norm is None
                continue
            specs = section_specs(MODEL, 2, part.section)
            decoded = decode_section(played.blobs.path(part.blob), specs, part.codec)
            assert part.norm == math.sqrt(norm_squared(decoded.values()))
            assert part.norm > 0


def test_without_blobs_there_are_no_norms(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    for digest in run.blobs().digests():
        run.blobs().remove(digest)
    assert {part.norm for row in rows(run) for g in row.given for part in g.parts} == {None}


def test_a_damaged_blob_has_no_norm_and_is_told(
    played: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_log(played, tmp_path)
    before = next(iter(rows(run, only_round=2)))
    given = next(g for g in before.given if g.peer == ADA.peer_id)
    blob = next(part.blob for part in given.parts if part.section == "shared")
    flip_file(run.blobs().path(blob))
    (row,) = rows(run, only_round=2)
    damaged = [part for g in row.given for part in g.parts if part.damaged]
    assert [(part.blob, part.norm) for part in damaged] == [(blob, None)]
    for more in ([], ["--round", "2"], ["--json"], ["--round", "2", "--json"]):
        assert main(["show", str(run.path), *more]) == 1
        told = capsys.readouterr()
        assert "damaged" in told.out
        command = f"spes-replay verify --all {run.path}"
        assert told.err == f"error: 1 blob is damaged, of round 2; see what else is wrong with: {command}\n"
    assert main(["show", str(run.path), "--round", "1"]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_commit_that_a_reset_took_back_is_not_shown(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start([log.claim(ADA), log.claim(BOB)])
    first = log.close_round([log.header(ADA), log.header(BOB)])
    log.close_round([log.header(ADA), log.header(BOB)])
    log.reset(first, first.after.members)
    log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    found = [(row.kind, row.round) for row in rows(log.run)]
    assert found == [("start", 0), ("commit", 0), ("reset", 1), ("commit", 1)]


def test_nothing_is_shown_that_does_not_verify(played: RunLog, tmp_path: Path) -> None:
    run = copy_log(played, tmp_path)
    rewrite_record(run, 3, flip(records(run)[3][1], 4000))
    with pytest.raises(IntegrityError, match="round 2"):
        list(rows(run))


def test_the_table(played: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(played.home)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 2 + 6
    assert f"start by …{ORGANIZER.peer_id[-6:]}" in lines[2]
    assert "2 of 3" in lines[6]
    assert f"…{EVE.peer_id[-6:]} norm" in lines[6]
    assert f"…{ADA.peer_id[-6:]} " in lines[6]


def test_one_round_in_detail(played: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(played.home), "--round", "2"]) == 0
    out = capsys.readouterr().out
    for said in ("group/0", "group/1", "int4", "int8", "refused: finite", "standby", ADA.peer_id, BOB.peer_id):
        assert said in out


def test_json_has_everything(played: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(played.home), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run_id"] == played.run.run_id.hex()
    assert len(found["rounds"]) == 6
    assert found["rounds"][-1]["state_root"] == played.chain.head.state_root.hex()
    assert {g["peer"] for g in found["rounds"][-1]["given"]} == {ADA.peer_id, BOB.peer_id, EVE.peer_id}


def test_a_round_that_is_not_there(played: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(played.home), "--round", "5"]) == 2
    assert "the ledger has no record of round 5" in capsys.readouterr().err


def test_every_table_fits_into_80_columns(played: RunLog) -> None:
    plain = next(iter(rows(played.run, only_round=3)))
    parts = tuple(replace(part, section="group/1000", norm=1.234e-123, bytes=10**12) for part in plain.given[0].parts)
    given = replace(plain.given[0], refused="blob_digest", tokens=10**14, steps=10**6, loss=1000.125, parts=parts)
    row = replace(plain, members=dict.fromkeys(plain.members, tuple(range(100))), given=(given, *plain.given))
    wide = StringIO()
    for picture in [replay_tables.overview([row], 80), *replay_tables.details([row])]:
        Console(file=wide, width=80).print(picture)
    Console(file=(free := StringIO()), width=400).print(*replay_tables.details([replace(row, members={})]))
    assert max(map(len, wide.getvalue().splitlines())) <= 80
    whole = {line.rstrip() for line in wide.getvalue().splitlines()}
    assert {line.rstrip() for line in free.getvalue().splitlines() if "…" in line} <= whole, "nothing is cut off"
    assert ",".join(map(str, range(8))) in wide.getvalue()


@pytest.mark.parametrize(("width", "absent"), [(200, []), (100, ["norm groups", "owners of groups"])])
def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which(width: int, absent: list[str]) -> None:
    table = replay_tables.overview([], width)
    shown = {str(column.header) for column in table.columns}
    assert {"round", "loss", "state after"} <= shown
    assert shown.isdisjoint(absent)
    assert str(table.caption or "").startswith(f"no room here for: {', '.join(absent)};" if absent else "")
