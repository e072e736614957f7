"""A machine's choices: what is allowed, what is refused, what a device does by itself."""

import pytest

from spes_p2p.core.engine import Engine, default_engine
from spes_p2p.core.peaks import known_peak, utilisation
from spes_protocols.errors import SchemaError


def test_a_gpu_keeps_frozen_experts_in_its_compute_dtype_and_a_cpu_in_fp32() -> None:
    assert default_engine("cpu") == Engine(frozen="fp32")
    assert default_engine("cuda") == Engine(frozen="bf16")
    assert default_engine("cpu").micro_batch is None


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"frozen": "fp16"}, "frozen"),
        ({"moments": "bf16"}, "moments"),
        ({"gradients": "int8"}, "gradients"),
        ({"recompute": 1}, "recompute"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"micro_batch": True}, "micro_batch"),
        ({"micro_batch": 1.5}, "micro_batch"),
        ({"grouped": True, "frozen": "int8"}, "grouped"),
    ],
)
def test_a_wrong_choice_is_named_with_what_is_allowed(wrong: dict[str, object], key: str) -> None:
    with pytest.raises(SchemaError, match=rf"engine\.{key} = .*: expected ") as caught:
        Engine(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_utilisation_is_of_a_known_peak_alone() -> None:
    assert known_peak("NVIDIA H100 PCIe") == 756e12
    assert known_peak("cpu") is None
    assert utilisation(1000.0, 6e9, 12e12) == pytest.approx(0.5)
    assert utilisation(1000.0, 6e9, None) == utilisation(1000.0, 6e9, 0.0) == 0.0
