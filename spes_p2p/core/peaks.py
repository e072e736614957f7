"""What a GPU's matrix products reach at most by its vendor's data sheet, to say how much of it a step uses.

Dense bf16 with fp32 accumulation, without sparsity: of GeForce cards half of what they reach with fp16 accumulation.
Each is tensor cores x what one does in a cycle x boost clock, as a test compares. `spes bench` measures the same on any
machine, and what was measured goes before what a data sheet says.
"""

from __future__ import annotations

_TERAFLOPS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A10": 125.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4080 SUPER": 104.4,
    "NVIDIA GeForce RTX 4080": 97.5,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA GeForce RTX 4070 Ti": 80.2,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 3080 Ti": 68.2,
    "NVIDIA GeForce RTX 3080": 59.5,
}


def known_peak(name: str) -> float | None:
    """Operations per second of a card by the driver's name for it; None for one that is not listed."""
    return _TERAFLOPS[name] * 1e12 if name in _TERAFLOPS else None


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float | None) -> float:
    """Model FLOPs utilisation (MFU; PaLM, appendix B): needed operations over the peak's; 0 where no peak is known.

    `flops_per_token` is `core.plan.step_flops_per_token`'s, which counts a frozen weight's missing gradient as such.
    """
    return tokens_per_second * flops_per_token / peak if peak else 0.0
