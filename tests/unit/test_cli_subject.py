"""What `spes plan` and `spes bench` are about: unfinished manifests, other numbers of peers, a file of measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_client import bench, measured
from spes_client.manifest_toml import render
from spes_client.measured import Measured, Step
from spes_client.presets import new_manifest
from spes_client.subject import of_preset
from spes_p2p.core.plan import step_flops_per_token
from tests.unit.cli_support import RATES, Spes


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Spes(capsys)


def known() -> Measured:
    tiny = of_preset("tiny")
    step = Step(
        name="tiny", model=tiny.model, groups=4, owned=1, seconds_per_token=1e-3, tokens_at_once=64,
        how="the whole model", measured_at=1e9,
    )  # fmt: skip
    return Measured(rates=RATES, measured_at=1e9, steps=(step,))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rounds = 'a'", "rounds"),
        ("rounds = {phases = 5}", "rounds.phases"),
        ("rounds = {phases = [5]}", "rounds.phases[0]"),
        ("rounds = {phases = [{from_step = 5, steps = 20, batch_sequences = 8}]}", "rounds.phases"),
        ("optimizer = 'a'", "optimizer"),
        ("optimizer = {lr = 0.1, warmup_steps = 1, total_steps = -5}", "optimizer.total_steps"),
        ("optimizer = {lr = 0.1, warmup_steps = 1, total_steps = true}", "optimizer.total_steps"),
        ("optimizer = {lr = 0.1, warmup_steps = 1, total_steps = " + "9" * 400 + "}", "optimizer.total_steps"),
        ("codecs = {shared = 5}", "codecs.shared"),
        ("ownership = {groups = 4, min_peers = 9}", "ownership.min_peers"),
        ("model = 1", "model"),
    ],
)
def test_a_draft_with_a_wrong_value_is_named_by_its_key(spes: Spes, tmp_path: Path, text: str, key: str) -> None:
    table = text.split(" ", 1)[0]
    plain = {name: value for name, value in new_manifest("tiny").items() if name not in (table, "data")}
    rendered = render(plain)
    kept, lines = True, []
    for line in rendered.splitlines():
        if line.startswith("["):
            kept = line.strip("[]").split(".")[0] not in (table, "data")
        if kept:
            lines.append(line)
    (tmp_path / "run.toml").write_text("\n".join([text, *lines]) + "\n")
    result = spes("plan", "--manifest", "run.toml")
    assert result.code == 2
    assert result.error.startswith(f"{key} = ")


def test_a_draft_that_never_ends_is_refused(spes: Spes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").symlink_to("/dev/zero")
    result = spes("plan", "--manifest", "run.toml")
    assert (result.code, "run.toml is larger than any manifest" in result.error) == (2, True)


def test_what_a_run_lets_one_peer_own_holds_for_fewer_peers_too(spes: Spes, tmp_path: Path) -> None:
    plain = new_manifest("1b")
    (tmp_path / "open.toml").write_text(render(plain))
    plain["ownership"]["groups_per_peer_max"] = 2
    (tmp_path / "two.toml").write_text(render(plain))

    def owned(*flags: object) -> int:
        return int(spes("plan", "--json", *flags).json["groups_owned"])

    assert [owned("--manifest", "open.toml", "--nodes", nodes) for nodes in (2, 4, 16)] == [8, 4, 1]
    assert [owned("--manifest", "two.toml", "--nodes", nodes) for nodes in (2, 4, 16)] == [2, 2, 1]
    assert owned("--manifest", "two.toml", "--nodes", 2, "--groups", 8) == 4  # other groups: nothing is said of them


def test_more_peers_than_groups_do_not_all_own_one(spes: Spes) -> None:
    assert "16 peers, 1 group for 8 of them; " in spes("plan", "--preset", "9b", "--nodes", 16).out
    assert "8 peers, 1 group for each; " in spes("plan", "--preset", "9b", "--nodes", 8).out


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("rates", "device"), "tpu"), (("rates", "device_name"), 5), (("rates", "matmul_flops"), float("inf")),
        (("rates", "adamw_elements"), True), (("rates", "apply_bytes"), 1e-300), (("rates", "threads"), "x"),
        (("rates", "hash_bytes"), 0), (("steps", 0, "measured_at"), "x"), (("steps", 0, "measured_at"), float("nan")),
        (("steps", 0, "groups"), 0), (("steps", 0, "owned"), "a"), (("steps", 0, "owned"), 9),
        (("steps", 0, "name"), 5), (("steps", 0, "how"), None), (("steps", 0, "tokens_at_once"), "z"),
        (("steps", 0, "seconds_per_token"), float("inf")), (("steps", 0, "seconds_per_token"), 1e-320),
        (("steps", 0, "model", "num_experts"), 0), (("measured_at",), None), (("version",), 2),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_of_measurements_counts_as_none(
    spes: Spes, tmp_path: Path, place: tuple[Any, ...], value: object
) -> None:
    home = tmp_path / "home"
    measured.save(home, known())
    assert measured.load(home) == known()
    plain = json.loads((home / measured.FILE).read_text())
    at: Any = plain
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (home / measured.FILE).write_text(json.dumps(plain))
    assert measured.load(home) is None
    assert "measure yours with: spes bench" in spes("plan", "--preset", "tiny").out


@pytest.mark.parametrize("make", [lambda text: text[:-40], lambda text: "[" * 100_000, lambda text: "[]"])
def test_a_file_of_measurements_that_is_none(spes: Spes, tmp_path: Path, make: Callable[[str], str]) -> None:
    home = tmp_path / "home"
    measured.save(home, known())
    (home / measured.FILE).write_text(make((home / measured.FILE).read_text()))
    assert measured.load(home) is None


def test_a_step_is_never_kept_beside_rates_of_other_threads(
    spes: Spes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"seconds_per_token": 1e-3, "tokens_at_once": 64, "how": "x", "device": "cpu", "device_name": "cpu"}
    monkeypatch.setattr(bench, "_torch_part", lambda *_: found | {"matmul_flops": 2e11, "adamw_elements": 1e9})
    monkeypatch.setattr(bench, "disk_rates", lambda folder: (1e8, 1e9, 0.01))
    monkeypatch.setattr(bench, "hash_rate", lambda: 4e8)
    monkeypatch.setattr(bench, "apply_rate", lambda folder: 4e8)
    measured.save(tmp_path / "home", known())

    def after(preset: str, threads: int) -> tuple[int, list[str]]:
        plain = spes("bench", "--preset", preset, "--device", "cpu", "--threads", threads, "--json").json
        return plain["rates"]["threads"], [step["name"] for step in plain["steps"]]

    assert after("1b", 1) == (1, ["1b", "tiny"])
    assert after("2b", 2) == (2, ["2b"])
    assert after("7b", 2) == (2, ["7b", "2b"])


def test_a_step_of_short_sequences_is_reckoned_as_one(tmp_path: Path) -> None:
    """Attention costs more in the run's long sequences than in those that were measured."""
    one = of_preset("1b")
    step = dataclasses.replace(known().steps[0], model=one.model, groups=16, tokens_at_once=64)
    parts = {length: step_flops_per_token(one.model, 16, 1, length) for length in (64, 2048)}
    assert parts[2048] > 1.05 * parts[64]
    some = dataclasses.replace(known(), steps=(step,))
    assert some.mfu(step) == pytest.approx(parts[64] / 1e-3 / 1e11)
    rate = some.tokens_per_second(one.model, 16, 1, 0, 64 * 2048)
    assert rate == pytest.approx(1e3 * parts[64] / parts[2048])


def test_a_model_s_name_is_no_markup(spes: Spes, tmp_path: Path) -> None:
    """Shown from the file of measurements: nothing is measured here."""
    one = known()
    step = dataclasses.replace(one.steps[0], name="[/tiny]\x1b[31m")
    measured.save(tmp_path / "home", dataclasses.replace(one, steps=(step,)))
    shown = spes("bench", "--preset", "tiny", "--device", "cpu", "--threads", 1)
    assert (shown.code, "[/tiny] [31m" in shown.out, "\x1b" in shown.out) == (0, True, False)
