"""From a job and a plan to everything a step needs, on this rank.

`Training` is the only mutable thing in a run besides the tensors: the step reached and the loss scale. `build` makes it,
`restore` moves it to a checkpoint, `save` writes one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import Manifest, read_manifest
from shardwise.checkpoint.save import Checkpointer, state_of
from shardwise.comm import Traffic
from shardwise.config import Config
from shardwise.data import Dataset
from shardwise.mesh import Mesh, Worker, join
from shardwise.optim import LossScale, local, make_optimizer
from shardwise.parallel import ParallelModel, parallelise
from shardwise.plan import Plan


@dataclass
class Training:
    """A run in memory: what never changes, and the step and loss scale that do."""

    config: Config
    plan: Plan
    mesh: Mesh
    traffic: Traffic
    parallel: ParallelModel
    optimizer: torch.optim.AdamW
    dataset: Dataset
    checkpointer: Checkpointer
    scale: LossScale
    step: int = 0

    @property
    def first_row(self) -> int:
        """Where this rank's share of every global batch begins."""
        return self.mesh.data_index * self.rows

    @property
    def rows(self) -> int:
        """Sequences of every global batch that are this rank's."""
        return self.config.train.global_batch // self.plan.layout.data_parallel


def build(config: Config, plan: Plan, worker: Worker, dataset: Dataset | None = None) -> Training:
    """Join the peers, build the model on the mesh, and open the data."""
    mesh = join(worker, plan.layout)
    traffic = Traffic(mesh)
    parallel = parallelise(config, plan, traffic)
    return Training(
        config=config,
        plan=plan,
        mesh=mesh,
        traffic=traffic,
        parallel=parallel,
        optimizer=make_optimizer(parallel.named_parameters(), config.train, parallel.embeddings),
        dataset=dataset or Dataset.open(config.data, config.train.seed),
        checkpointer=Checkpointer(mesh),
        scale=LossScale.of(config.train),
    )


def restore(training: Training, folder: Path) -> None:
    """Continue from a checkpoint."""
    manifest = read_manifest(folder)
    same_world = manifest.world == training.mesh.worker.world
    training.checkpointer.load(folder, _state(training), same_world)
    _share_tied(training)
    training.step = manifest.step
    if training.scale.dynamic and manifest.train.get("precision") == "float16":
        training.scale = LossScale(**{**asdict(training.scale), **manifest.loss_scale})


def save(training: Training) -> Path:
    """Write a checkpoint of the step reached."""
    config = training.config
    return training.checkpointer.save(
        Path(config.run.folder),
        _state(training),
        config.checkpoint.keep,
        partial(_manifest, training),
    )


def _state(training: Training) -> dict[str, Tensor]:
    parallel = training.parallel
    return state_of(parallel.named_parameters(), training.optimizer, parallel.named_buffers())


@torch.no_grad()
def _share_tied(training: Training) -> None:
    """Both copies of a tied weight are on this rank, where first and last stage are; the last of them was loaded."""
    loaded = dict(training.parallel.named_parameters())
    for name, copy in training.parallel.named_parameters():
        if name in loaded and loaded[name] is not copy:
            local(copy).copy_(local(loaded[name]))
            moments = training.optimizer.state[loaded[name]]
            training.optimizer.state[copy] = {key: value.detach().clone() for key, value in moments.items()}


def _manifest(training: Training, files: dict[str, Any]) -> Manifest:
    config = training.config
    return Manifest(
        step=training.step,
        model=config.model.model_dump(exclude={"preset"}),
        train=config.train.model_dump(mode="json"),
        data=config.data.model_dump(mode="json"),
        layout=training.plan.layout.model_dump(),
        loss_scale={"value": training.scale.value, "clean_steps": training.scale.clean_steps},
        world=training.mesh.worker.world,
        torch=str(torch.__version__),
        files=files,
    )
