"""The trainer's memory: what each outcome makes of it, and that it comes back from disk as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.core.tensors import tensor_specs
from spes_p2p.model.moments import Moments, quantise_mean, quantise_square
from spes_p2p.train.state import FILE_NAME, Pending, TrainerState, load_state, save_state
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import IntegrityError, UserError
from tests.unit.model_support import GROUPS, MODEL

CPU = torch.device("cpu")
SPECS = {spec.name: spec for spec in tensor_specs(MODEL, GROUPS)}
SHAPES = {name: spec.shape for name, spec in SPECS.items()}
SHARED_NAME = "model.norm.weight"
OWNED_NAME = "model.layers.1.mlp.experts.2.down_proj.weight"
OTHER_NAME = "model.layers.0.mlp.experts.7.up_proj.weight"
NAMES = (SHARED_NAME, OWNED_NAME, OTHER_NAME)


def filled(name: str, value: float) -> np.ndarray:
    return np.full(SHAPES[name], value, np.float32)


def section_of(name: str) -> str:
    return SPECS[name].section


def a_state(*, pending: bool = True) -> TrainerState:
    """Residuals 1 if missed, 2 if counted, in the shared section, group 1 and group 3."""
    state = TrainerState(
        moments={
            name: Moments(steps=3 + i, mean=torch.full(SHAPES[name], 0.5), square=torch.full(SHAPES[name], 0.25))
            for i, name in enumerate(NAMES)
        },
        residuals={name: filled(name, 1.0) for name in NAMES},
    )
    if pending:
        state.pending = Pending(
            task=pb.TrainRound(round=7, epoch=b"e" * 32, groups=[1, 3]),
            done=pb.RoundDone(round=7, tokens=99, sections=[pb.SectionFile(name="shared", digest=b"d" * 32)]),
            counted={name: filled(name, 2.0) for name in NAMES},
        )
    return state


@pytest.mark.parametrize(
    ("outcome", "counted", "expected"),
    [
        (pb.COUNTED, ["shared", "group/1", "group/3"], [2.0, 2.0, 2.0]),
        (pb.COUNTED, ["group/1"], [1.0, 2.0, 1.0]),
        (pb.COUNTED, ["shared"], [2.0, 1.0, 1.0]),
        (pb.MISSED, [], [1.0, 1.0, 1.0]),
        (pb.UNKNOWN, [], [1.0, 1.0, 1.0]),
        (pb.REFUSED, [], [1.0, None, None]),
    ],
)
def test_each_outcome_leaves_its_residuals(outcome: pb.Outcome, counted: list[str], expected: list[float]) -> None:
    state = a_state()
    state.settle(outcome, counted, section_of)
    assert [float(state.residuals[n].flat[0]) if n in state.residuals else None for n in NAMES] == expected
    assert state.pending is None
    assert state.moments.keys() == set(NAMES)


def test_settling_twice_changes_nothing() -> None:
    state = a_state()
    state.settle(pb.COUNTED, ["shared"], section_of)
    state.settle(pb.REFUSED, [], section_of)
    assert state.residuals[OWNED_NAME].flat[0] == 1.0


def test_what_is_no_longer_trained_is_forgotten() -> None:
    state = a_state(pending=False)
    state.keep({SHARED_NAME, OTHER_NAME})
    assert state.moments.keys() == state.residuals.keys() == {SHARED_NAME, OTHER_NAME}


@pytest.mark.parametrize("pending", [True, False])
def test_it_comes_back_from_disk_as_it_was(tmp_path: Path, pending: bool) -> None:
    state = a_state(pending=pending)
    save_state(state, tmp_path / "optim", SHAPES)
    found = load_state(tmp_path / "optim", SHAPES)
    assert {name: value.steps for name, value in found.moments.items()} == {n: 3 + i for i, n in enumerate(NAMES)}
    for name in NAMES:
        assert torch.equal(found.moments[name].mean, state.moments[name].mean)
        assert torch.equal(found.moments[name].square, state.moments[name].square)
        assert np.array_equal(found.residuals[name], state.residuals[name])
    if not pending:
        assert found.pending is None
        return
    assert found.pending.task == state.pending.task
    assert found.pending.done == state.pending.done
    assert all(np.array_equal(found.pending.counted[name], filled(name, 2.0)) for name in NAMES)


def test_8_bit_moments_come_back_code_by_code(tmp_path: Path) -> None:
    mean = torch.randn(SHAPES[OWNED_NAME], generator=torch.Generator().manual_seed(0))
    state = TrainerState(
        moments={
            SHARED_NAME: Moments(steps=2, mean=torch.ones(24), square=torch.ones(24)),
            OWNED_NAME: Moments(steps=5, mean=quantise_mean(mean), square=quantise_square(mean.square())),
        }
    )
    save_state(state, tmp_path, SHAPES)
    found = load_state(tmp_path, SHAPES).moments
    assert (tmp_path / FILE_NAME).stat().st_size < 3.5 * mean.numel() + 8 * 24 + 2000
    assert isinstance(found[SHARED_NAME].mean, torch.Tensor)
    for name in ("mean", "square"):
        kept, wanted = getattr(found[OWNED_NAME], name), getattr(state.moments[OWNED_NAME], name)
        assert torch.equal(kept.codes, wanted.codes)
        assert torch.equal(kept.scales, wanted.scales)


def test_a_file_of_the_version_before_8_bit_moments_is_read(tmp_path: Path) -> None:
    save_state(a_state(), tmp_path, SHAPES)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b'"version":"2"', b'"version":"1"'))
    assert load_state(tmp_path, SHAPES).moments.keys() == set(NAMES)
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(IntegrityError, match="version '9'"):
        load_state(tmp_path, SHAPES)


def test_nothing_on_disk_is_an_empty_state(tmp_path: Path) -> None:
    assert load_state(tmp_path / "optim", SHAPES) == TrainerState()


def test_a_new_state_replaces_the_old_one_alone(tmp_path: Path) -> None:
    save_state(a_state(), tmp_path, SHAPES)
    save_state(a_state(pending=False), tmp_path, SHAPES)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert load_state(tmp_path, SHAPES).pending is None


@pytest.mark.parametrize("damage", ["cut", "garbage", "other model"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    save_state(a_state(), tmp_path, SHAPES)
    path = tmp_path / FILE_NAME
    shapes = dict(SHAPES)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "garbage":
        path.write_bytes(b"\xff" * 1000)
    else:
        shapes[OWNED_NAME] = (3, 3)
    with pytest.raises(IntegrityError, match="delete the file") as caught:
        load_state(tmp_path, shapes)
    assert caught.value.where == str(path)


def test_a_state_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(UserError, match="cannot write"):
        save_state(a_state(), tmp_path, SHAPES)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
