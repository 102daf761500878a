"""What a device could do at best, so that what it did can be put in proportion: model FLOP utilisation (PaLM,
2022).

MFU is the FLOPs the model needs per token, times tokens per second, over the peak of all devices. It counts
the model's own arithmetic only, never recomputation, so it compares layouts fairly; the convention for FLOPs
per token is the planner's and is named beside every MFU shown.

The peaks are the makers' dense figures (without structured sparsity), with products accumulated in float32,
as torch does, and TF32 off. A device that is not in the table has no peak and its MFU is n/a: a wrong
denominator is worse than none. That is why names are matched whole: an A10 is not an A100, and a laptop's
4090, a 4090 D or a slice of an A100 (MIG) is none of them.
"""

from __future__ import annotations

import re

_T = 1e12


def _peaks(
    half: float, float32: float | None, bfloat16: bool = True, float8: bool = False
) -> dict[str, float]:
    peaks = {"float16": half * _T, **({"float8": 2 * half * _T} if float8 else {})}
    if bfloat16:
        peaks["bfloat16"] = half * _T
    if float32 is not None:
        peaks["float32"] = float32 * _T
    return peaks


_SIZE = r"(?:[- ]\d+ ?GB)?"

_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # name as the driver gives it, without the maker; TFLOP/s in 16 bits; in float32
    (r"GB200", _peaks(2500, None, float8=True)),
    (r"B200", _peaks(2250, None, float8=True)),
    (rf"GH200{_SIZE}", _peaks(989.5, 67, float8=True)),
    (r"H200 NVL", _peaks(835.5, 60, float8=True)),
    (r"H200", _peaks(989.5, 67, float8=True)),
    (r"H100 NVL", _peaks(835.5, 60, float8=True)),
    (rf"H100{_SIZE} PCIe{_SIZE}", _peaks(756, 51, float8=True)),
    (r"H100(?: 80GB HBM3|[- ]SXM5?(?:[- ]80GB)?)", _peaks(989.5, 67, float8=True)),
    (r"H20", _peaks(148, 44, float8=True)),
    (rf"A[18]00(?:[- ](?:SXM4?|PCIE))?{_SIZE}(?: PCIe)?", _peaks(312, 19.5)),
    (r"A30", _peaks(165, 10.3)),
    (r"A40", _peaks(149.7, 37.4)),
    (r"A10G", _peaks(70, 35)),
    (r"A10", _peaks(125, 31.2)),
    (r"RTX A6000", _peaks(154.8, 38.7)),
    (r"L40S", _peaks(362, 91.6, float8=True)),
    (r"L40", _peaks(181, 90.5, float8=True)),
    (r"L4", _peaks(121, 30.3, float8=True)),
    (r"RTX 5090", _peaks(209.5, 104.8)),
    (r"RTX 4090", _peaks(165.2, 82.6)),
    (r"RTX 3090", _peaks(71, 35.6)),
    (rf"V100[- ]SXM[23]{_SIZE}", _peaks(125, 15.7, bfloat16=False)),
    (rf"V100[- ]PCIE{_SIZE}", _peaks(112, 14, bfloat16=False)),
    (r"T4", _peaks(65, 8.1, bfloat16=False)),
    (r"MI325X", _peaks(1307, 163.4)),
    (r"MI300X", _peaks(1307, 163.4)),
    (r"MI250X", _peaks(191.5, None)),  # one of its two dies, which is what torch calls a device
)

_MAKERS = re.compile(r"^(?:NVIDIA |AMD |Tesla |Instinct |GeForce )*", re.IGNORECASE)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak in FLOP/s of one device in a training precision; None where it is not known. Never a guess.

    `precision` is spelt as in `train.precision`. float64 is for proofs, not for speed, and has no peak here.
    """
    name = _MAKERS.sub("", device_name.strip())
    for pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return peaks.get(precision)
    return None


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float | None) -> float | None:
    """Share of the devices' peak that the model's own arithmetic used; None where the peak is not known."""
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
