"""How often to save: the interval that loses least, between saving too often and computing too much again.

A save stops training for C seconds. A failure, once in M seconds on average, throws away half an interval on
average, and R seconds go by until training goes on. With t seconds between saves, the share of time lost is
to first order

    C / t  +  t / (2 M)  +  R / M

which is least at t = sqrt(2 C M) (Young, 1974; Daly, 2006, adds terms that matter only where C comes near M).
The minimum is flat: an interval twice too long or too short raises the first two terms by a quarter, so a
rough M is good enough.

C is what a save costs the run, not what it takes: a save in the background stops training only for the copy
in host memory, and may be made as often as the storage keeps up, which is the lower limit on t here.

M comes from the run's own faults once there were three of them. Before that it comes from the largest public
record: Llama 3 405B saw 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama Team, 2024, section
3.3.4), one in about 50,700 device hours. Failures of devices add up, so M falls with their number: at that
rate a run on 1,024 devices fails every two days.

Before a run all of this can be told from sizes alone (`plan_checkpoints`). A checkpoint holds a parameter and
its optimizer states, with AdamW 12 bytes in float32. Each device copies its share to the host at the speed of
that link, which is the stall; all nodes together write at the speed of the storage that they share, which is
the save; after a failure the same bytes are read back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""Hours of one device from failure to failure, where nothing better is known."""

ENOUGH_FAULTS = 3
"""Faults of its own after which a run's record counts for more than somebody else's."""

RESTART = 600.0
"""Seconds from a failure until state is read back, where nothing is known: noticing it, finding the broken
machine, starting. MegaScale, on over 10,000 GPUs, needs less than ten minutes on average to notice and to
diagnose (Jiang et al., 2024)."""

_HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """How often a run fails: seconds from one failure to the next, and how that is known."""

    seconds: float
    basis: str


@dataclass(frozen=True)
class Advice:
    """How often to save, and what follows from it."""

    every_seconds: float
    every_steps: int
    mtbf_hours: float
    basis: str
    """Where the mean time between failures comes from."""
    expected_goodput: float
    """The share of time that is neither saving, nor computing again, nor restarting."""


@dataclass(frozen=True)
class CheckpointPlan:
    """What checkpoints will cost, before there is a run."""

    bytes: float
    """Of one checkpoint."""
    stall_seconds: float
    """That training stops for one."""
    save_seconds: float
    """Until one is safe."""
    restart_seconds: float
    """From a failure until training goes on."""
    storage_bytes: float
    """For those kept and the one being written."""
    advice: Advice


def failures(
    devices: int, faults: int = 0, seconds: float = 0.0, device_hours: float = DEVICE_HOURS
) -> Failures:
    """The mean time between failures of a run on so many devices, which had so many faults in so many
    seconds."""
    if faults >= ENOUGH_FAULTS and seconds > 0:
        return Failures(seconds / faults, f"this run's {faults} faults")
    who = "one device that fails" if devices == 1 else f"{devices:,} devices that each fail"
    basis = f"{who} once in {device_hours:,.0f} hours" + (
        ", as in Llama 3's training" if device_hours == DEVICE_HOURS else ""
    )
    return Failures(device_hours * _HOUR / devices, basis)


def best_interval(save: float, between_failures: float) -> float:
    """Seconds between saves at which least is lost, when a save costs `save` seconds."""
    return math.sqrt(2 * save * between_failures)


def expected_goodput(interval: float, save: float, between_failures: float, restart: float = 0.0) -> float:
    """The share of time that counts, to first order; not below 0."""
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
    """How often to save, from what was measured: seconds that training stops for a save, that the save takes,
    that a step takes and that a restart takes; and the faults in so many seconds of this run.
    """
    known = failures(devices, faults, seconds, device_hours)
    wished = max(best_interval(stall, known.seconds), save)
    steps = max(1, round(wished / step))
    return Advice(
        every_seconds=wished,
        every_steps=steps,
        mtbf_hours=known.seconds / _HOUR,
        basis=known.basis,
        expected_goodput=expected_goodput(steps * step, stall, known.seconds, restart),
    )


def storage_bytes(parameters: float, bytes_per_parameter: float, kept: int = 2) -> float:
    """Room that checkpoints need: for those kept, and for the next, which is written before the oldest
    goes."""
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
    """What checkpoints of a model will cost on a cluster, and how often to make them; bandwidths in
    bytes/s."""
    size = parameters * bytes_per_parameter
    transfer = size / storage_bandwidth
    copy = size / devices / host_bandwidth
    stall, save = (copy, copy + transfer) if background else (transfer, transfer)
    again = restart + transfer
    advice = advise(stall, save, step_seconds, devices, restart=again, device_hours=device_hours)
    return CheckpointPlan(
        size, stall, save, again, storage_bytes(parameters, bytes_per_parameter, keep), advice
    )
