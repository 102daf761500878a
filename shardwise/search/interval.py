"""How often to save: the interval that loses least time to saves and to work repeated after failures.

A save stops training for C seconds. A failure, once in M seconds on average, loses half an interval on
average, and R seconds pass until training continues. With t seconds between saves, the share of time lost is
to first order

    C / t  +  t / (2 M)  +  R / M

which is least at t = sqrt(2 C M) (Young, 1974; Daly, 2006, adds terms that matter only if C is near M). The
minimum is flat: an interval twice too long or too short raises the first two terms by a quarter, so a rough M
is good enough.

C is the time that a save stops training, not the time until it is stored. A save in the background stops
training only for the copy to host memory. Saves can follow each other as fast as the storage can write, which
is the lower limit on t here.

M comes from the run's own faults once there were three of them. Before that it comes from the largest public
record: Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama Team, 2024, section
3.3.4), one in about 50,700 device hours. Failures of devices add up, so M falls with their number: at that
rate a run on 1,024 devices fails every two days.

Before a run, sizes alone give all of this (`plan_checkpoints`). A checkpoint holds each parameter and its
optimizer states, 12 bytes in float32 with AdamW. Each device copies its share to the host over its link; that
is the stall. All nodes together write to the storage that they share; that is the save. After a failure the
same bytes are read back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Mean hours between failures of one device, where nothing better is known."""

ENOUGH_FAULTS = 3
"""Number of faults after which a run's own record is used instead of the public one."""

RESTART = 600.0
"""Seconds from a failure until state is read back, where nothing is known: noticing the failure, finding the
broken machine, starting. MegaScale, on over 10,000 GPUs, needs less than ten minutes on average to notice and
to diagnose (Jiang et al., 2024)."""

_HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """Mean seconds between failures of a run, and how that is known."""

    seconds: float
    basis: str


@dataclass(frozen=True)
class Advice:
    """How often to save, and what follows from it."""

    every_seconds: float
    every_steps: int
    mtbf_hours: float
    basis: str
    """How the mean time between failures is known."""
    expected_goodput: float
    """Fraction of the time that is neither saving, nor computing again, nor restarting."""


@dataclass(frozen=True)
class CheckpointPlan:
    """What checkpoints will cost, before there is a run."""

    bytes: float
    """Bytes of all files of one checkpoint."""
    stall_seconds: float
    """Seconds that training stops for one checkpoint."""
    save_seconds: float
    """Seconds until one checkpoint is stored safely."""
    restart_seconds: float
    """Seconds from a failure until training continues."""
    storage_bytes: float
    """Bytes for all checkpoints that are kept and the one being written."""
    advice: Advice


def failures(
    devices: int, faults: int = 0, seconds: float = 0.0, device_hours: float = DEVICE_HOURS
) -> Failures:
    """Return the mean time between failures of a run on this many devices, which had `faults` faults in
    `seconds` seconds."""
    if faults >= ENOUGH_FAULTS and seconds > 0:
        return Failures(seconds / faults, f"this run's {faults} faults")
    who = "one device that fails" if devices == 1 else f"{devices:,} devices that each fail"
    basis = f"{who} once in {device_hours:,.0f} hours" + (
        ", as in Llama 3's training" if device_hours == DEVICE_HOURS else ""
    )
    return Failures(device_hours * _HOUR / devices, basis)


def best_interval(save: float, between_failures: float) -> float:
    """Return the seconds between saves at which least time is lost, if a save costs `save` seconds."""
    return math.sqrt(2 * save * between_failures)


def expected_goodput(interval: float, save: float, between_failures: float, restart: float = 0.0) -> float:
    """Return the fraction of time that is useful, to first order, and not below 0."""
    return max(0.0, 1 - save / interval - interval / (2 * between_failures) - restart / between_failures)


def advise(
    stall: float,
    save: float,
    step: float,
    devices: int,
    faults: int = 0,
    seconds: float = 0.0,
    restart: float = 0.0,
    device_hours: float = DEVICE_HOURS,
) -> Advice:
    """Return how often to save, from what was measured.

    `stall` is how many seconds training stops for a save, `save` how many the save takes, `step` how many a
    step takes, and `restart` how many a restart takes. The run had `faults` faults in `seconds` seconds.
    """
    known = failures(devices, faults, seconds, device_hours)
    interval = max(best_interval(stall, known.seconds), save)
    steps = max(1, round(interval / step))
    return Advice(
        every_seconds=interval,
        every_steps=steps,
        mtbf_hours=known.seconds / _HOUR,
        basis=known.basis,
        expected_goodput=expected_goodput(steps * step, stall, known.seconds, restart),
    )


def storage_bytes(parameters: float, bytes_per_parameter: float, kept: int = 2) -> float:
    """Return the bytes that checkpoints need: for those that are kept, and for the next, which is written
    before the oldest is removed."""
    return parameters * bytes_per_parameter * (kept + 1)


def plan_checkpoints(
    parameters: float,
    devices: int,
    storage_bandwidth: float,
    step_seconds: float,
    device_hours: float = DEVICE_HOURS,
    background: bool = True,
    *,
    bytes_per_parameter: float,
    host_bandwidth: float = 50e9,
    keep: int = 2,
    restart: float = RESTART,
) -> CheckpointPlan:
    """Return what checkpoints of a model will cost on a cluster, and how often to make them. Bandwidths are
    in bytes/s."""
    size = parameters * bytes_per_parameter
    transfer = size / storage_bandwidth
    copy = size / devices / host_bandwidth
    stall, save = (copy, copy + transfer) if background else (transfer, transfer)
    again = restart + transfer
    advice = advise(stall, save, step_seconds, devices, restart=again, device_hours=device_hours)
    return CheckpointPlan(
        size, stall, save, again, storage_bytes(parameters, bytes_per_parameter, keep), advice
    )
