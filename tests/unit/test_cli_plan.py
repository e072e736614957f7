"""`spes plan`, `spes bench` and what `spes-join` chooses: figures, tables that fit, files that are not trusted."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spes_client import bench, fitting, machine, measured
from spes_client.machine import Card, Machine, parse_card
from spes_client.measured import Measured, Step
from spes_client.presets import new_manifest
from spes_client.subject import Subject, of_preset
from spes_p2p.core.choice import Wish
from spes_p2p.core.plan import GIB
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.trainer_link import TrainerOptions
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest
from tests.unit.cli_support import RATES, Spes, complete, write_toml
from tests.unit.model_support import MODEL


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    return Spes(capsys)


def a_machine(*, card_gib: float = 0.0, host_gib: float = 64.0) -> Machine:
    """A machine with a card of so much memory, half a GiB of it in use."""
    card = Card(name="Card 9", total_bytes=int(card_gib * GIB), free_bytes=int((card_gib - 0.5) * GIB))
    return Machine(
        card=card if card_gib else None, host_total_bytes=int(host_gib * GIB), host_free_bytes=int(host_gib * GIB),
        disk_free_bytes=10**12, cores=8,
    )  # fmt: skip


@pytest.mark.parametrize(("preset", "at_most"), [("1b", 3.3), ("2b", 5.2), ("7b", 16.0)])
def test_the_published_models_at_16_nodes(spes: Spes, preset: str, at_most: float) -> None:
    found = spes("plan", "--preset", preset, "--nodes", 16, "--json").json
    assert (found["nodes"], found["groups"], found["groups_owned"]) == (16, 16, 1)
    options = found["options"]
    assert len(options) == 3 * 2 * 2 * 2
    smallest = min(options, key=lambda option: option["total_gib"])
    assert (smallest["frozen"], smallest["moments"], smallest["gradients"]) == ("int8", "int8", "bf16")
    assert smallest["total_gib"] <= at_most
    for option in options:
        parts = [option[f"{name}_gib"] for name in ("weights", "gradients", "moments")]
        assert option["total_gib"] == pytest.approx(sum(parts)) and option["device_gib"] > option["total_gib"]
    traffic = found["traffic_bytes_per_round"]
    assert traffic["sent"] == 15 * traffic["contribution"] == traffic["received"]
    assert found["rounds"] > 100 and found["log_run_bytes"] > found["rounds"] * traffic["received"]


@pytest.mark.parametrize(
    "arguments", [["--preset", "7b", "--nodes", 16], ["--preset", "9b", "--all", "--device", "cpu"]]
)
def test_the_table_fits_into_80_columns(spes: Spes, arguments: list[object]) -> None:
    lines = spes("plan", *arguments).out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("frozen"))
    table = lines[first : lines.index("", first)]
    assert len(table) in (4, 5, 25) and max(map(len, table)) <= 80
    assert max(len(line) for line in lines[:first]) <= 80


def test_of_a_manifest_that_is_not_finished_and_of_other_numbers(spes: Spes, tmp_path: Path) -> None:
    from spes_client.manifest_toml import render

    path = tmp_path / "run.toml"
    path.write_text(render(new_manifest("1b")))
    found = spes(
        "plan", "--manifest", path, "--groups", 8, "--nodes", 4, "--seq", 512, "--micro-batch", 3, "--json"
    ).json
    assert (found["groups"], found["groups_owned"], found["sequence_length"]) == (8, 2, 512)
    assert found["sequences_at_a_time"] == 3


def test_a_draft_and_what_is_signed_of_it_plan_alike(spes: Spes, tmp_path: Path) -> None:
    plain = complete(tmp_path)
    plain["ownership"]["groups_per_peer_max"] = 2
    plain["rounds"]["shared_quota"] = 2
    draft, key = write_toml(tmp_path, plain), tmp_path / "organizer.key"
    spes("keys", "new", "--key", key)
    spes("run", "sign", draft, "--key", key)
    found = [spes("plan", "--manifest", path, "--json").json for path in (draft, draft.with_suffix(".spes"))]
    for name in ("name", "nodes", "groups_owned", "rounds", "traffic_bytes_per_round", "disk_bytes"):
        assert found[0][name] == found[1][name], name
    del plain["rounds"]["shared_quota"]
    everybodys = spes("plan", "--manifest", write_toml(tmp_path, plain), "--json").json
    assert found[0]["disk_bytes"]["blobs"] < everybodys["disk_bytes"]["blobs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run at "),
        (["--preset", "3b"], "no preset '3b'"),
        (["--preset", "tiny", "--manifest", "run.toml"], "not both"),
        (
            ["--preset", "tiny", "--groups", "5"],
            "cannot be divided into 5 groups; use one of 1, 2, 4, 8, 16",
        ),
        (["--manifest", "nowhere.toml"], "no file nowhere.toml"),
        (["--preset", "tiny", "--seq", "0"], "expected a whole number from 8"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(spes: Spes, arguments: list[str], words: str) -> None:
    result = spes("plan", *arguments)
    assert result.code == 2 and words in result.error


def test_a_manifest_with_a_wrong_table_is_named(spes: Spes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[model]\nvocab_size = -4\n[ownership]\ngroups = 1\nmin_peers = 1\n')
    assert "model.vocab_size" in spes("plan", "--manifest", path).error
    path.write_text("model = 3\n")
    assert "model = 3" in spes("plan", "--manifest", path).error


def known(subject: Subject, seconds_per_token: float = 1e-3) -> Measured:
    """As if it had been measured just now."""
    step = Step(
        name=subject.name, model=subject.model, groups=subject.groups, owned=1, seconds_per_token=seconds_per_token,
        tokens_at_once=256, how="the whole model", measured_at=measured.time.time(),
    )  # fmt: skip
    return Measured(rates=RATES, measured_at=step.measured_at, steps=(step,))


def test_what_was_measured_is_kept_and_used(spes: Spes, tmp_path: Path) -> None:
    home, subject = tmp_path / "home", of_preset("tiny")
    saved = known(subject)
    measured.save(home, saved)
    assert measured.load(home) == saved
    text = spes("plan", "--preset", "tiny").out
    assert "at 400 MB/s, measured here just now" in text and "20 steps at" in text and "measured on cpu" in text
    found = spes("plan", "--preset", "tiny", "--json").json
    tokens = 8 * 128  # a thousandth of a second each, then AdamW
    assert found["tokens_per_second"] == pytest.approx(tokens / (tokens * 1e-3 + found["parameters_trained"] / 1e9))
    assert "reckoned from tiny" in spes("plan", "--preset", "1b").out
    table = spes("bench", "--preset", "tiny")  # measured before, so only shown
    assert table.code == 0 and " 1 000 " in table.out and "--again" in table.out


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9}', "{" * 10_000, '{"version":1,"rates":{},"measured_at":0,"steps":[]}']
)
def test_a_file_that_is_not_understood_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / measured.FILE).write_text(text)
    assert measured.load(tmp_path) is None


def test_figures_that_cannot_be_count_as_none(tmp_path: Path) -> None:
    good = known(of_preset("tiny"))
    measured.save(tmp_path, good)
    plain = json.loads((tmp_path / measured.FILE).read_text())
    for wrong in (0, -1.0, "fast", None):
        plain["rates"]["apply_bytes"] = wrong
        (tmp_path / measured.FILE).write_text(json.dumps(plain))
        assert measured.load(tmp_path) is None


def test_bench_measures_a_small_model_whole(spes: Spes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spes_client.manifest_toml import render

    monkeypatch.setattr(bench, "SECONDS", 1.0)
    monkeypatch.setattr(bench, "_DISK_BYTES", 2**23)
    monkeypatch.setattr(bench, "_APPLY_MODEL", dataclasses.asdict(MODEL))
    plain = new_manifest("tiny") | {"model": dataclasses.asdict(MODEL), "ownership": {"groups": 4, "min_peers": 2}}
    path = tmp_path / "run.toml"
    path.write_text(render(plain))
    found = spes("bench", "--manifest", path, "--device", "cpu", "--json").json
    assert all(value > 0 for value in found["rates"].values() if not isinstance(value, str))
    (step,) = found["steps"]
    assert step["how"] == "the whole model" and step["tokens_per_second"] > 0 and 0 < step["mfu"] < 1
    home = tmp_path / "home"
    assert [entry.name for entry in home.iterdir()] == [measured.FILE]
    kept = measured.load(home)
    assert kept is not None and kept.steps[0].model == MODEL and kept.steps[0].owned == 2


def test_a_measuring_process_that_fails_is_told_in_a_line(spes: Spes) -> None:
    result = spes("bench", "--preset", "tiny", "--device", "cuda")
    if result.code:
        assert "no CUDA device is usable here" in result.error


def test_bench_is_interrupted_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spes_client.main", "bench", "--preset", "1b", "--dir", str(tmp_path)]
    # Where the tests run in the background of a script, SIGINT is ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    until_started(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def until_started(pid: int) -> None:
    """Until the command has started its measuring process."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not children.read_text().split():
        assert Path(f"/proc/{pid}").exists()


def test_the_command_itself_does_without_torch() -> None:
    code = "import sys, spes_client.main as m; m.main(['plan', '--preset', 'tiny']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_card_is_read_from_its_drivers_line(monkeypatch: pytest.MonkeyPatch) -> None:
    card = parse_card("NVIDIA GeForce RTX 4090, 24564, 23028\n")
    assert card == Card(name="NVIDIA GeForce RTX 4090", total_bytes=24564 * 2**20, free_bytes=23028 * 2**20)
    for line in ("", "No devices were found", "GB10, [N/A], [N/A]", "x"):
        assert parse_card(line) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.find_cards() == ()
    here = machine.look(Path("nowhere") / "at all")
    assert 0 < here.host_free_bytes <= here.host_total_bytes and here.disk_free_bytes > 0


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("max", "current", "stat")]
    (tmp_path / "meminfo").write_text("MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 12000000 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tuple(paths),))

    def seen() -> tuple[int, int]:
        here = machine.look(tmp_path)
        return here.host_total_bytes, here.host_free_bytes

    whole = (16_000_000 * 1024, 12_000_000 * 1024)
    assert seen() == whole  # no container
    for path, text in zip(paths, ("4000000000", "3000000000", "anon 5\ninactive_file 500000000\n"), strict=True):
        path.write_text(text)
    assert seen() == (4_000_000_000, 1_500_000_000)
    paths[0].write_text("max\n")
    assert seen() == whole


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A run of the 1b model, 16 groups, up to 4 for a peer, 256 sequences in a peer's step."""
    from spes_client.manifest_toml import to_manifest

    small = to_manifest(
        complete(tmp_path_factory.mktemp("data")), "12D3KooWGq98GWDgguWRechDvjHVQ6T45A4BpsLiksr1MHt7EHMm"
    )
    large = of_preset("1b")
    rounds = dataclasses.replace(small.rounds, phases=large.phases)
    return dataclasses.replace(small, model=large.model, ownership=large.ownership, rounds=rounds)


def fitted(
    manifest: Manifest, here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    groups: int | None = None, devices: int = 1, **wish: object,
) -> tuple[PeerOptions, list[str]]:  # fmt: skip
    """What `spes-join` makes of the options on a machine, and what it says."""
    monkeypatch.setattr(fitting, "look", lambda home: here)
    trainer = TrainerOptions(engine=Wish(**wish), devices=devices)  # type: ignore[arg-type]
    lines: list[str] = []
    options = fitting.fit(manifest, PeerOptions(home=tmp_path, groups=groups, trainer=trainer), lines.append)
    return options, lines


def test_join_takes_what_fits_and_says_so(manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options, (line,) = fitted(manifest, a_machine(card_gib=24), monkeypatch, tmp_path)
    assert (
        line.startswith("Card 9, 23.5 GiB of 24.0 GiB free: 4 groups, ")
        and " of 256 sequences at a time; needs" in line
    )
    assert options.groups is None and options.trainer.engine.frozen == "bf16"
    options, (line,) = fitted(manifest, a_machine(card_gib=7), monkeypatch, tmp_path)
    assert options.groups is not None and options.groups < 4 and options.trainer.engine.frozen == "int8"
    measured.save(
        tmp_path, dataclasses.replace(known(of_preset("1b")), rates=dataclasses.replace(RATES, device="cuda"))
    )
    _, lines = fitted(manifest, a_machine(card_gib=24), monkeypatch, tmp_path)
    assert "a round's steps take about" in lines[1] and "measured on cuda here just now" in lines[1]


def test_join_keeps_what_was_asked_for_and_says_that_it_does_not_fit(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options, (line,) = fitted(
        manifest, a_machine(card_gib=8), monkeypatch, tmp_path, groups=4, frozen="bf16", moments="fp32"
    )
    assert "what you asked for needs" in line and "this would fit: " in line
    assert options.groups == 4 and options.trainer.engine.frozen == "bf16" and options.trainer.engine.moments == "fp32"


def test_join_keeps_fp32_moments_where_8_bits_could_not_follow_them(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    narrow, _ = fitted(manifest, a_machine(card_gib=9), monkeypatch, tmp_path)
    assert narrow.trainer.engine.moments == "int8"
    slow = dataclasses.replace(manifest, optimizer=dataclasses.replace(manifest.optimizer, beta2=0.99))
    wide, _ = fitted(slow, a_machine(card_gib=9), monkeypatch, tmp_path)
    assert wide.trainer.engine.moments == "fp32"
    with pytest.raises(UserError, match="does not fit into this machine"):
        fitted(slow, a_machine(card_gib=3), monkeypatch, tmp_path)


def test_join_on_several_cards(manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = Card(name="Card 9", total_bytes=24 * GIB, free_bytes=23 * GIB)
    here = dataclasses.replace(a_machine(card_gib=24), cards=(first, dataclasses.replace(first, free_bytes=20 * GIB)))
    _, (line,) = fitted(manifest, here, monkeypatch, tmp_path, devices=2)
    assert line.startswith("2 x Card 9, 20.0 GiB of 24.0 GiB free on each: 4 groups") and " on each, beside" in line
    with pytest.raises(UserError, match="3 GPUs were asked for, and 2 are usable here"):
        fitted(manifest, here, monkeypatch, tmp_path, devices=3)


def test_plan_shows_a_part_of_the_model_for_each_of_several_gpus(spes: Spes) -> None:
    asked = ("plan", "--preset", "7b", "--nodes", 16)
    one, four = spes(*asked, "--json").json, spes(*asked, "--gpus", 4, "--json").json
    assert (one["devices"], four["devices"]) == (1, 4)
    assert four["options"][0]["total_gib"] == pytest.approx(one["options"][0]["total_gib"] / 4, rel=1e-3)
    assert not any(option["gradients"] == "bf16" for option in four["options"])
    shown = spes(*asked, "--gpus", 4, "--all").out
    assert "GiB on each of 4 GPUs" in shown and "4 cards of" in shown


@pytest.mark.parametrize(
    ("environment", "code", "gpus"),
    [
        ({}, 0, None),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, 0, "4"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, 0, "not called"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 2, "not called"),
    ],
)
def test_torchruns_first_process_is_the_peer(
    environment: dict[str, str], code: int, gpus: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import spes_client.__main__ as module

    asked = []
    monkeypatch.setattr(module, "main", lambda: asked.append(dict(os.environ)) or 0)
    monkeypatch.delenv("SPES_GPUS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert module.start() == code
    if gpus == "not called":
        assert not asked
    else:
        assert asked[0].get("SPES_GPUS") == gpus
        assert not asked[0].keys() & {"LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"}


def test_join_refuses_where_nothing_fits(manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for here in (a_machine(card_gib=2), a_machine(host_gib=1)):
        with pytest.raises(
            UserError, match=r"does not fit into this machine.*the least there is, 1 group, .*, needs "
        ) as caught:
            fitted(manifest, here, monkeypatch, tmp_path)
        assert "\n" not in str(caught.value)


def test_join_on_a_cpu_with_little_memory_warns(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, lines = fitted(manifest, a_machine(host_gib=8), monkeypatch, tmp_path)
    assert lines[0].startswith("CPU, 8.0 GiB of memory free: ") and "memory is tight" in lines[1]
    _, lines = fitted(manifest, a_machine(host_gib=200), monkeypatch, tmp_path)
    assert len(lines) == 1
