"""The peak FLOP/s of devices by the makers' data sheets: one table for the planner and for MFU.

The peaks are dense (without structured sparsity), with products accumulated in float32, as torch does, and
with TF32 off. Where a sheet gives only figures with sparsity, they are halved.

A device that is not in the table has no peak, and its MFU is n/a: a wrong denominator is worse than none. For
the same reason names are matched whole: an A10 is not an A100, and a laptop's 4090, a 4090 D and a slice of
an A100 (MIG) are not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_T = 1e12
_SIZE = r"(?:[- ]\d+ ?GB)?"


@dataclass(frozen=True)
class DevicePeaks:
    """The peaks of a device."""

    names: str
    """Regular expression for the names that drivers give to the device, without the maker's name."""
    flops: Mapping[str, float]
    """FLOP/s in each precision that the device supports."""


def _peaks(
    names: str,
    half: float,
    float32: float | None,
    float8: float | None = None,
    float4: float | None = None,
    bfloat16: bool = True,
) -> DevicePeaks:
    """Return peaks from TFLOP/s. `half` is for float16, and for bfloat16 if the device supports that."""
    tflops = {
        "float32": float32,
        "float16": half,
        "bfloat16": half if bfloat16 else None,
        "float8": float8,
        "float4": float4,
    }
    return DevicePeaks(
        names, {precision: _T * peak for precision, peak in tflops.items() if peak is not None}
    )


PEAKS: dict[str, DevicePeaks] = {
    # TFLOP/s in 16 bits, in float32, in float8, in float4.
    # Blackwell. NVIDIA's specifications of GB200 NVL72 and GB300 NVL72 (72 GPUs: 360 PFLOP/s in 16 bits with
    # sparsity; a superchip of two: 160 TFLOP/s in float32), and of HGX B200 and HGX B300 (8 GPUs: 36 PFLOP/s
    # in 16 bits with sparsity, 600 TFLOP/s in float32; an early brief on the architecture has 80 for a GPU).
    "gb300": _peaks(r"GB300", 2500, 80, 5000, 15000),
    "gb200": _peaks(r"GB200", 2500, 80, 5000, 10000),
    "b300": _peaks(r"B300(?: SXM6(?: AC)?)?", 2250, 75, 4500, 13500),
    "b200": _peaks(r"B200", 2250, 75, 4500, 9000),
    # Hopper. NVIDIA's data sheets of GH200, H200, H100 and H20.
    "gh200": _peaks(rf"GH200{_SIZE}", 989.5, 67, 1979),
    "h200-nvl": _peaks(r"H200 NVL", 835.5, 60, 1671),
    "h200": _peaks(r"H200", 989.5, 67, 1979),
    "h100-nvl": _peaks(r"H100 NVL", 835.5, 60, 1671),
    "h100-pcie": _peaks(rf"H100{_SIZE} PCIe{_SIZE}", 756, 51, 1512),
    "h100": _peaks(r"H100(?: 80GB HBM3|[- ]SXM5?(?:[- ]80GB)?)", 989.5, 67, 1979),
    "h20": _peaks(r"H20", 148, 44, 296),
    # Ampere and Ada. NVIDIA's data sheets; of GeForce, the white papers on GA102, AD102 and GB202.
    "a100": _peaks(rf"A[18]00(?:[- ](?:SXM4?|PCIE))?{_SIZE}(?: PCIe)?", 312, 19.5),
    "a30": _peaks(r"A30", 165, 10.3),
    "a40": _peaks(r"A40", 149.7, 37.4),
    "a10g": _peaks(r"A10G", 70, 35),
    "a10": _peaks(r"A10", 125, 31.2),
    "rtx-a6000": _peaks(r"RTX A6000", 154.8, 38.7),
    "l40s": _peaks(r"L40S", 362, 91.6, 733),
    "l40": _peaks(r"L40", 181, 90.5, 362),
    "l4": _peaks(r"L4", 121, 30.3, 242),
    "rtx-5090": _peaks(r"RTX 5090", 209.5, 104.8),
    "rtx-4090": _peaks(r"RTX 4090", 165.2, 82.6),
    "rtx-3090": _peaks(r"RTX 3090", 71, 35.6),
    # Volta and Turing, which have no bfloat16. NVIDIA's data sheets of V100 and T4.
    "v100": _peaks(rf"V100[- ]SXM[23]{_SIZE}", 125, 15.7, bfloat16=False),
    "v100-pcie": _peaks(rf"V100[- ]PCIE{_SIZE}", 112, 14, bfloat16=False),
    "t4": _peaks(r"T4", 65, 8.1, bfloat16=False),
    # AMD's data sheets of MI325X and MI300X: 1307.4 TFLOP/s in 16 bits, 2614.9 in float8, without sparsity.
    "mi325x": _peaks(r"MI325X", 1307, 163.4, 2615),
    "mi300x": _peaks(r"MI300X", 1307, 163.4, 2615),
    "mi250x": _peaks(r"MI250X", 191.5, None),  # one of its two dies, which is what torch calls a device
}

_MAKERS = re.compile(r"^(?:NVIDIA |AMD |Tesla |Instinct |GeForce )*", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak in FLOP/s of one device in a training precision; None if it is unknown.

    `precision` is a value of `train.precision`. float64 is for proofs, not for speed, and has no peak here.
    """
    name = _MAKERS.sub("", device_name.strip())
    for peaks in PEAKS.values():
        if re.fullmatch(peaks.names, name, re.IGNORECASE):
            return peaks.flops.get(precision)
    return None
