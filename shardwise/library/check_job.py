"""Checks of a job before anything starts or is written. config/read.py lists their problems together with its
own. They do not need torch.

Each check reads only those tables that are valid by themselves, so that a mistake in one table does not hide
what is wrong elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Check, Config, Sections
    from shardwise.drivers.driver import WorkerCounts

NEAR = 64
"""Number of smaller numbers of workers that are tried if no layout is possible, before powers of two are."""
FOLDERS = ("run.folder", "checkpoint.folder")
"""Settings that name a folder to write to."""


def checks_of_run(counts_of: Callable[[Config], WorkerCounts]) -> Sequence[Check]:
    """Return the checks of a job that is to be trained. `counts_of` returns the numbers of its workers, or
    raises an error if they are impossible."""
    return [
        *checks_of_proof(),
        weights_problems,
        _extras,
        _resume,
        _folders,
        lambda sections: _worker_counts(sections, counts_of),
    ]


def checks_of_proof() -> Sequence[Check]:
    """Return the checks of a job that computes on this machine in any way."""
    return [_torch, _device, _data, _module, _program, float8_problems]


def checks_of_submission(
    counts_of: Callable[[Config], WorkerCounts | None], problems_of: Callable[[Config], Iterator[str]]
) -> Sequence[Check]:
    """Return the checks of a job that other machines train: those that need neither the devices nor the
    memory of this one. `counts_of` returns the numbers of workers if they are known, and `problems_of` yields
    why the job cannot be submitted."""
    return [
        *(_data, _module, _program, float8_problems, weights_problems, _extras, _resume, _folders),
        lambda sections: _worker_counts(sections, counts_of, here=False),
        lambda sections: _of_complete(sections, problems_of),
    ]


def _of_complete(sections: Sections, problems_of: Callable[[Config], Iterator[str]]) -> Iterator[str]:
    from shardwise.config import complete_config

    if config := complete_config(sections):
        yield from problems_of(config)


def _torch(sections: Sections) -> Iterator[str]:
    from shardwise.library.torch_version import torch_problem

    if problem := torch_problem():
        yield problem


def _device(sections: Sections) -> Iterator[str]:
    """Raise an error if the job requests GPUs and there are none."""
    from shardwise.config import Run
    from shardwise.mesh import uses_gpus

    if isinstance(run := sections.get("run"), Run) and run.device == "cuda":
        uses_gpus(1, run.device)
    yield from ()


def _extras(sections: Sections) -> Iterator[str]:
    from shardwise.config import Observe
    from shardwise.config.module_file import problems_of_callbacks
    from shardwise.observe.sinks import missing_extras

    if isinstance(observe := sections.get("observe"), Observe):
        yield from missing_extras(observe)
        yield from problems_of_callbacks(observe.callbacks)


def _data(sections: Sections) -> Iterator[str]:
    from shardwise.config import Data, Model
    from shardwise.data.check_data import has_to_be_prepared, problems_of_data

    data, model = sections.get("data"), sections.get("model")
    if isinstance(data, Data) and (data.source is not None or data.sources):
        known = model.__dict__ if isinstance(model, Model) else {}  # only the valid values
        yield from problems_of_data(data, known.get("vocabulary"), known.get("pretrained"))
        if has_to_be_prepared(data):
            yield from _unusable("data.cache", data.cache, ".shardwise/data")


def weights_problems(sections: Sections) -> Iterator[str]:
    """Yield the problems of the files of a pretrained model, by their headers. A job that resumes from a
    checkpoint no longer needs these files."""
    from shardwise.checkpoint import to_resume
    from shardwise.checkpoint.pretrained import open_folder
    from shardwise.config import Model, complete_config
    from shardwise.errors import RunFailed, UserError
    from shardwise.train.resume import resume_of

    model, config = sections.get("model"), complete_config(sections)
    if not isinstance(model, Model) or model.pretrained is None:
        return
    with suppress(UserError):  # `_resume` reports what is wrong with it
        if config and to_resume(resume_of(config)):
            return
    try:
        open_folder(Path(model.pretrained))
    except RunFailed:
        raise
    except UserError as error:
        # worded as in config/pretrained_folder.py, so that it is listed once
        yield f"model.pretrained: {error}"


def _module(sections: Sections) -> Iterator[str]:
    from shardwise.config import Layout, Model
    from shardwise.config.module_file import problems_of_module

    model, layout = sections.get("model"), sections.get("layout")
    if isinstance(model, Model) and model.module is not None and not model.is_of_program:
        yield from problems_of_module(model, layout if isinstance(layout, Layout) else None)


def _program(sections: Sections) -> Iterator[str]:
    from shardwise.config import Model, Run
    from shardwise.config.module_file import problems_of_program

    run, model = sections.get("run"), sections.get("model")
    if isinstance(run, Run) and run.program is not None:
        yield from problems_of_program(run.program)
    elif isinstance(model, Model) and model.is_of_program:
        yield "model.module = 'program': no program is given; add run.program = 'file.py:function'"


def float8_problems(sections: Sections) -> Iterator[str]:
    """Yield the float8 settings that have no effect, whatever else is wrong with the model or the layout."""
    from shardwise.config import Model, Train
    from shardwise.plans.float8_choice import unknown_patterns

    model, train = sections.get("model"), sections.get("train")
    if isinstance(model, Model) and isinstance(train, Train) and model.module is None:
        yield from unknown_patterns(model, train)


def _resume(sections: Sections) -> Iterator[str]:
    """Raise an error if the checkpoint to resume from cannot be used.

    Whether the run's own checkpoints fit the job is checked once the job has no other mistake.
    """
    from shardwise.checkpoint import to_resume
    from shardwise.config import complete_config
    from shardwise.train.resume import resume_of

    if (config := complete_config(sections)) and config.checkpoint.resume not in ("auto", "never"):
        to_resume(resume_of(config))
    yield from ()


def _folders(sections: Sections) -> Iterator[str]:
    """Yield the folders of the job that cannot be created."""
    for setting in FOLDERS:
        table, _, key = setting.partition(".")
        if (folder := getattr(sections.get(table), key, None)) is not None:
            yield from _unusable(setting, folder, "runs/mine")


def _unusable(setting: str, folder: str, example: str) -> Iterator[str]:
    """Yield why nothing can be written to a folder or to an address. A missing folder is not created here."""
    from shardwise.checkpoint.storage import storage
    from shardwise.errors import UserError
    from shardwise.observe.record_files import check_room

    try:
        if "://" in folder or folder.startswith("memory:"):
            storage(folder)
            return
        path = Path(folder).absolute()
        existing = next(above for above in [path, *path.parents] if os.path.lexists(above))
        if existing.is_dir():
            check_room(path, setting, 0)
        else:
            advice = f"Give another, for example {setting}={example}"
            yield f"{setting} = {folder!r}: {existing} is not a folder. {advice}"
    except UserError as error:
        yield str(error) if str(error).startswith(setting) else f"{setting} = {folder!r}: {error}"


def _worker_counts(
    sections: Sections, counts_of: Callable[[Config], WorkerCounts | None], here: bool = True
) -> Iterator[str]:
    """Check that the layout is possible on this number of devices and, if they are `here`, fits in their
    memory. If the planner chooses the layout, check that any is possible."""
    from shardwise.config import complete_config, layout_is_possible
    from shardwise.drivers.registry import driver_of
    from shardwise.mesh import device_memory
    from shardwise.plans import choose
    from shardwise.search.planner import left_to_the_planner

    if (config := complete_config(sections)) is None or config.layout.data == 0:
        return
    if (counts := counts_of(config)) is None:
        return
    if not layout_is_possible(config.model, config.data, config.train, config.layout):
        return  # `read` reports it, and the values that work
    named = config.cluster.preset is not None or config.cluster.file is not None
    plain = config.model.module is None and driver_of(config).lockstep
    if plain and left_to_the_planner(config, counts.most, cluster_is_named=named):
        yield from _no_layout(config, counts)
    elif plain:
        choose(config, counts.most, device_memory(counts.here, config.run.device) if here else None)


def _no_layout(config: Config, counts: WorkerCounts) -> Iterator[str]:
    """Yield that no layout is possible on this number of workers, and on which number one is.

    This is known without measuring the machine, which takes minutes with many workers.
    """
    from shardwise.config.compression import AUTO
    from shardwise.plurals import counted
    from shardwise.search.candidates import candidates, fixed_fields

    fixed = fixed_fields(config)
    if config.layout.compression == AUTO or len((tried := candidates(config, counts.most, fixed)).space):
        return
    reasons = "; ".join(tried.refused) or "what [layout] asks for is not of so many"
    near = range(counts.most - 1, max(0, counts.most - 1 - NEAR), -1)
    halves = (1 << power for power in reversed(range((counts.most - 1).bit_length())))
    fewer = next((count for count in (*near, *halves) if len(candidates(config, count, fixed).space)), 1)
    advice = f"give --workers {fewer}" if counts.here == counts.most else f"there are some on {fewer}"
    yield f"no layout is possible on {counted(counts.most, 'worker')}: {reasons}; {advice}"
