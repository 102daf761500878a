"""What a job asks for that the run it continues did not, where it changes what the next steps do.

A run may go on with another batch, another length or other data: nothing is refused, and nothing changes
unsaid. The data goes on after the sequences seen, the learning rate by the step. A batch that grows along the
way (a ramp) thus sees every sequence once, and the schedule stays what it was planned to be, in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from shardwise.checkpoint import Manifest
from shardwise.config import Config, Train
from shardwise.plan.learning_rate import learning_rate, turns

MOST_COMPARED = 10_000
"""Steps, or up to twice as many: rank 0 compares them while the others wait for the first step."""
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
    """A sentence for each kind of change between the run that saved this checkpoint and the job that goes on
    from it."""
    if not manifest.train:
        return  # weights from elsewhere, with no training behind them
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
    if schedule := _differing(manifest, config, _SCHEDULE):
        yield from _rescheduled(schedule, manifest, config.train)


def _rescheduled(changed: str, manifest: Manifest, train: Train) -> Iterator[str]:
    """From which step on the learning rate is another than it would have been; nothing if it never is."""
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
    """The steps at which two schedules are compared: all of them; of very many some, evenly spaced, and those
    at which a schedule turns, since two smooth curves that differ between turns differ nearly everywhere
    there.
    """
    near_turns = {turn + after for train in (before, now) for turn in turns(train) for after in (0, 1)}
    return sorted(
        {*steps[:: max(1, len(steps) // MOST_COMPARED)], *(step for step in near_turns if step in steps)}
    )


def _differing(manifest: Manifest, config: Config, keys: Iterable[tuple[str, str]]) -> str:
    """Which of these settings have changed, and how."""
    wanted = config.model_dump(mode="json")
    triples = [
        (f"{section}.{key}", getattr(manifest, section).get(key), wanted[section][key])
        for section, key in keys
    ]
    return " and ".join(
        f"{name} was {before!r} and is now {now!r}" for name, before, now in triples if before != now
    )
