"""Run directories: found by what people type, locked by one process, their manifest checked."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.crypto.envelope import seal
from spes_p2p.store.rundir import RunDir, pin_run, pinned_run, resolve_run_dir
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from tests.unit.store_support import run, start
from tests.vectors.generate import BOB, MANIFEST, ORGANIZER, RUN_ID

SIGNED = seal(MANIFEST, ORGANIZER).raw
OTHER = seal(replace(MANIFEST, name="another"), ORGANIZER).raw


def test_a_run_is_created_and_opened(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path, SIGNED)
    assert created.path == tmp_path / "runs" / RUN_ID.hex()
    assert created.run_id == RUN_ID
    assert created.manifest_path.read_bytes() == SIGNED
    assert RunDir.open(created.path) == RunDir.create(tmp_path, SIGNED) == created
    with created.ledger() as ledger:
        assert ledger.length() == 0
    assert created.blobs().digests() == [] and created.blobs().directory == created.blobs_dir
    assert created.states().rounds() == [] and created.states().directory == created.snapshots_dir
    assert created.ledger_path.exists()
    for path in (created.optim_dir, created.out_dir, created.cache_dir):
        assert path.is_dir() and path.parent == created.path
    assert {created.control_address_path.name, created.log_path.name} == {"control.addr", "log"}


def test_the_states_are_of_the_manifests_model(tmp_path: Path) -> None:
    names = [tensor.name for tensor in RunDir.create(tmp_path, SIGNED).states().layout.tensors]
    assert names == sorted(names)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names


def test_a_bad_manifest_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RemoteError) as caught:
        RunDir.create(tmp_path, seal(MANIFEST, BOB).raw)
    assert caught.value.check == "identity"
    assert os.listdir(tmp_path) == []


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path, SIGNED)
    changed = bytearray(SIGNED)
    changed[SIGNED.index(b"vectors")] ^= 1
    created.manifest_path.write_bytes(changed)
    with pytest.raises(IntegrityError) as caught:
        RunDir.open(created.path)
    assert (caught.value.check, caught.value.where) == ("signature", str(created.manifest_path))


def test_what_people_give_is_resolved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run at"):
        resolve_run_dir(tmp_path)
    with pytest.raises(UserError, match="not a run directory"):
        RunDir.open(tmp_path)
    created = RunDir.create(tmp_path, SIGNED)
    assert resolve_run_dir(created.path) == resolve_run_dir(tmp_path) == created
    other = RunDir.create(tmp_path, OTHER)
    with pytest.raises(UserError, match="holds 2 runs"):
        resolve_run_dir(tmp_path)
    pin_run(tmp_path, other.run_id)
    assert resolve_run_dir(tmp_path) == other


def test_a_home_follows_the_run_it_pinned(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert pinned_run(home) is None
    pin_run(home, RUN_ID)
    pin_run(home, RUN_ID)
    assert pinned_run(home) == RUN_ID
    with pytest.raises(UserError, match=r"follows run .*another --dir"):
        pin_run(home, bytes(32))
    assert pinned_run(home) == RUN_ID
    for text in ("", "zz", "00" * 31, "é"):
        (home / "pin").write_text(text, encoding="utf-8")
        with pytest.raises(IntegrityError, match="expected a run id"):
            pinned_run(home)


HOLD = (
    "import sys\nfrom pathlib import Path\nfrom spes_p2p.store.rundir import RunDir\n"
    "with RunDir.open(Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    sys.stdin.readline()"
)
TRY = (
    "import sys\nfrom pathlib import Path\nfrom spes_p2p.store.rundir import RunDir\n"
    "from spes_protocols.errors import UserError\n"
    "try:\n    with RunDir.open(Path(sys.argv[1])).lock():\n        print('got it')\n"
    "except UserError as error:\n    print(error)"
)


def test_one_process_holds_a_run(tmp_path: Path) -> None:
    path = RunDir.create(tmp_path, SIGNED).path
    holder = start(HOLD, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    status, out = run(TRY, path)
    assert status == 0
    assert f"{path} is in use by pid {holder.pid}:" in out
    holder.kill()
    holder.communicate()
    assert run(TRY, path) == (0, "got it\n")


def test_locking_clears_what_was_left_unfinished(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path, SIGNED)
    left = [folder / ".new-1-abc" for folder in (created.path, created.blobs_dir, created.snapshots_dir)]
    kept = created.blobs().partial(bytes(32))
    for path in (*left, kept):
        path.write_bytes(b"half")
    with created.lock():
        assert not any(path.exists() for path in left)
        assert kept.exists()
    with created.lock():
        pass
