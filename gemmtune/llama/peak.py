"""Dense peak rates of GPUs, by the name that torch gives the device. Pure.

Figures are TFLOP/s without structured sparsity, from the vendors' data sheets: AMD Instinct MI300X,
MI325X and MI355X; NVIDIA H100 and H200 (which print the rate with sparsity, twice these), HGX B200.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense matrix rates in TFLOP/s."""

    gpu: str
    bf16: float
    fp8: float


# Pattern of the device name → rates; the first that matches counts, so variants stand before
# the part they are a variant of. MI308X, GH200, GB200 and others have rates of their own.
PEAKS = (
    (r"\bMI300X\b", Peak("MI300X", 1307.4, 2614.9)),
    (r"\bMI325X\b", Peak("MI325X", 1307.4, 2614.9)),
    (r"\bMI355X\b", Peak("MI355X", 2516.6, 5033.2)),
    (r"\bH100\b.*\bPCIe\b", Peak("H100 PCIe", 756.5, 1513.0)),
    (r"\bH100\b.*\bNVL\b", Peak("H100 NVL", 835.5, 1670.5)),
    (r"\bH100\b", Peak("H100", 989.4, 1978.9)),
    (r"\bH200\b.*\bNVL\b", Peak("H200 NVL", 835.5, 1670.5)),
    (r"\bH200\b", Peak("H200", 989.4, 1978.9)),
    (r"\bB200\b", Peak("B200", 2250.0, 4500.0)),
)


def find_peak(device_name: str) -> Peak | None:
    """The rates of a device such as "NVIDIA H100 80GB HBM3"; None for one not in the table."""
    for pattern, peak in PEAKS:
        if re.search(pattern, device_name):
            return peak
    return None
