"""Peaks of cards against what tensor cores do in a cycle: with sparsity, or fp16 sums, a figure is too large."""

from __future__ import annotations

import pytest

from spes_p2p.core import peaks

# Dense bf16 operations of one tensor core in a cycle, accumulated in fp32: half of them on GeForce.
HOPPER, AMPERE_CENTRE, WORKSTATION, GEFORCE = 2048 * 2 // 4, 2048 // 4, 1024 // 4, 512 // 4

# (tensor cores, boost clock in MHz, operations in a cycle) by the vendor's architecture papers and data sheets.
CARDS = {
    "NVIDIA H200": (528, 1830, HOPPER),
    "NVIDIA H100 80GB HBM3": (528, 1830, HOPPER),
    "NVIDIA H100 PCIe": (456, 1620, HOPPER),
    "NVIDIA A100-SXM4-40GB": (432, 1410, AMPERE_CENTRE),
    "NVIDIA A100-SXM4-80GB": (432, 1410, AMPERE_CENTRE),
    "NVIDIA A100-PCIE-40GB": (432, 1410, AMPERE_CENTRE),
    "NVIDIA A100 80GB PCIe": (432, 1410, AMPERE_CENTRE),
    "NVIDIA L40S": (568, 2520, WORKSTATION),
    "NVIDIA L4": (232, 2040, WORKSTATION),
    "NVIDIA A40": (336, 1740, WORKSTATION),
    "NVIDIA A10": (288, 1695, WORKSTATION),
    "NVIDIA RTX A6000": (336, 1800, WORKSTATION),
    "NVIDIA GeForce RTX 5090": (680, 2407, GEFORCE),
    "NVIDIA GeForce RTX 4090": (512, 2520, GEFORCE),
    "NVIDIA GeForce RTX 4080 SUPER": (320, 2550, GEFORCE),
    "NVIDIA GeForce RTX 4080": (304, 2505, GEFORCE),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (264, 2610, GEFORCE),
    "NVIDIA GeForce RTX 4070 Ti": (240, 2610, GEFORCE),
    "NVIDIA GeForce RTX 3090 Ti": (336, 1860, GEFORCE),
    "NVIDIA GeForce RTX 3090": (328, 1695, GEFORCE),
    "NVIDIA GeForce RTX 3080 Ti": (320, 1665, GEFORCE),
    "NVIDIA GeForce RTX 3080": (272, 1710, GEFORCE),
}
BY_DATA_SHEET_ALONE = {"NVIDIA H100 NVL": 835.5, "NVIDIA L40": 181.0}
"""Whose clock under load is not the one that the sheet's figure goes by."""


@pytest.mark.parametrize("name", CARDS)
def test_a_peak_is_what_the_tensor_cores_do(name: str) -> None:
    cores, megahertz, operations = CARDS[name]
    found = peaks.known_peak(name)
    assert found == pytest.approx(cores * operations * megahertz * 1e6, rel=0.015)


def test_every_listed_card_is_compared_and_no_other_has_a_peak() -> None:
    assert peaks._TERAFLOPS.keys() == CARDS.keys() | BY_DATA_SHEET_ALONE.keys()
    assert {name: peaks.known_peak(name) for name in BY_DATA_SHEET_ALONE} == {
        name: value * 1e12 for name, value in BY_DATA_SHEET_ALONE.items()
    }
    for name in ("", "cpu", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert peaks.known_peak(name) is None
        assert peaks.utilisation(1e4, 1e9, peaks.known_peak(name)) == 0.0
    assert peaks.utilisation(1e4, 1e9, 1e14) == 0.1
