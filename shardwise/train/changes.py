"""Notes on settings that differ between a job and the run that it continues, and that affect the next steps.

A run may continue with another batch, another length or other data. Nothing is refused, but every change is
reported. The data continue after the sequences seen, the learning rate by the step. So if the batch is
increased during a run (a ramp), every sequence is still seen once, and the schedule keeps its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from shardwise.checkpoint import Manifest
from shardwise.config import Config, Train
from shardwise.plans.learning_rate import learning_rate, turns

MOST_COMPARED = 10_000
"""About how many steps two schedules are compared at (up to twice as many), while other ranks wait."""
_ORDER = (
    ("train", "seed"),
    *(
        ("data", key)
        for key in ("source", "sources", "tokenizer", "text_field", "sequence_length", "held_out")
    ),
)
_BATCH = (("train", "global_batch"),)
_OPTIMIZER = (("optimizer", "name"),)
_SCHEDULE = tuple(
    ("train", key) for key in ("steps", "learning_rate", "final_learning_rate", "schedule", "warmup", "decay")
)


def changes(manifest: Manifest, config: Config) -> Iterator[str]:
    """Yield a sentence for each kind of change between the run that saved this checkpoint and the job that
    continues from it."""
    if not manifest.train:
        return  # imported weights, which no run of ours has trained
    batch = _differing(manifest, config, _BATCH)
    if _differing(manifest, config, _ORDER):
        yield (
            f"{_differing(manifest, config, (*_BATCH, *_ORDER))}, so the data goes on in another order than "
            f"the run began with"
        )
    elif batch:
        yield (
            f"{batch}: the data goes on after the {manifest.sequences:,} sequences seen, none skipped or "
            f"repeated; "
            "the learning rate goes on by the step"
        )
    if manifest.optimizer and (optimizer := _differing(manifest, config, _OPTIMIZER)):
        yield f"{optimizer}, which goes on with the state that is there"
    if (before := manifest.optimizer.get("groups", {})) != (now := config.optimizer.groups):
        yield f"optimizer.groups was {before} and is now {now}"
    if schedule := _differing(manifest, config, _SCHEDULE):
        yield from _rescheduled(schedule, manifest, config.train)


def _rescheduled(changed: str, manifest: Manifest, train: Train) -> Iterator[str]:
    """Yield the first step at which the learning rate differs from the earlier schedule; nothing if none."""
    try:
        before = Train.model_validate(
            {key: manifest.train[key] for _, key in _SCHEDULE if key in manifest.train}
        )
    except ValidationError:  # of another version, whose schedules we do not know
        yield f"{changed}, so the learning rate may follow another schedule than the run began with"
        return
    for step in _compared(range(manifest.step + 1, train.steps + 1), before, train):
        planned, now = learning_rate(before, step), learning_rate(train, step)
        if planned != now:
            yield (
                f"{changed}, so the learning rate follows another schedule than the run began with: "
                f"{now:.3g} at step {step}, where it would have been {planned:.3g}"
            )
            return


def _compared(steps: range, before: Train, now: Train) -> list[int]:
    """Return the steps at which two schedules are compared. If there are too many for all, they are evenly
    spaced, together with the steps around each turn of a schedule: two smooth curves that differ anywhere
    between turns differ nearly everywhere there.
    """
    near_turns = {turn + after for train in (before, now) for turn in turns(train) for after in (0, 1)}
    return sorted(
        {*steps[:: max(1, len(steps) // MOST_COMPARED)], *(step for step in near_turns if step in steps)}
    )


def _differing(manifest: Manifest, config: Config, keys: Iterable[tuple[str, str]]) -> str:
    """Return which of these settings have changed, and how; an empty text if none has."""
    wanted = config.model_dump(mode="json")
    triples = [
        (f"{section}.{key}", getattr(manifest, section).get(key), wanted[section][key])
        for section, key in keys
    ]
    return " and ".join(
        f"{name} was {before!r} and is now {now!r}" for name, before, now in triples if before != now
    )
