"""Builds everything that a step needs on this rank, from a job and a plan.

Besides the tensors, `Training` is the only mutable state of a run: the step, the sequences seen and the loss
scale. `build` makes it, and `start_from_seed` draws its weights. `restore` loads a checkpoint and `save`
writes one; `recall` and `keep_copy` do the same with the memory of other workers.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from shardwise._torch import compute_deterministically
from shardwise.checkpoint import Manifest, read_manifest
from shardwise.checkpoint.huggingface_files import (
    file_key,
    files_of_checkpoint,
    files_of_folder,
    has_tokenizer,
)
from shardwise.checkpoint.pretrained import open_folder
from shardwise.checkpoint.save import (
    Checkpointer,
    Retention,
    State,
    random_state,
    set_random_state,
    state_of,
)
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents
from shardwise.comm import Comm, Peers
from shardwise.config import Config
from shardwise.config.pretrained_folder import TOKENIZER
from shardwise.data import Dataset, with_data_settings
from shardwise.data.chat import FILE as TEMPLATE
from shardwise.data.chat import find_template
from shardwise.data.samples import Samples
from shardwise.drivers.driver import RankDriver
from shardwise.drivers.registry import driver_of
from shardwise.errors import UserError
from shardwise.mesh import Mesh, Worker, join
from shardwise.optim import LossScale, ShardedOptimizer, local, make_optimizer
from shardwise.parallel import ParallelModel, first_values, parallelise
from shardwise.parallel.placement import assign, local_slices
from shardwise.plans import ModelSpec, Plan
from shardwise.resilience.memory_snapshots import MemorySnapshots
from shardwise.train.check_module import check_module
from shardwise.train.resume import checkpoint_folder
from shardwise.train.shares import RowShares

log = logging.getLogger("shardwise")


class RunningProgram(Protocol):
    """What a run needs of a user's program beside its gradients (train/program.py)."""

    asks_to_stop: bool
    asks_to_save: bool

    @property
    def callbacks(self) -> Sequence[object]:
        """Objects whose methods are called on steps and events."""

    def saved_state(self) -> torch.Tensor:
        """Return the program's own values as bytes."""

    def load_state(self, saved: torch.Tensor) -> None:
        """Replace the program's own values by saved ones."""

    def take_logged(self) -> dict[str, float]:
        """Return the numbers that the program has recorded since the last call."""


@dataclass
class Training:
    """The state of a run on this rank: constant parts, and the step, the data position and the loss scale."""

    config: Config
    plan: Plan
    mesh: Mesh
    comm: Comm
    parallel: ParallelModel
    optimizer: ShardedOptimizer
    dataset: Dataset | Samples
    checkpointer: Checkpointer
    peers: Peers
    """Connections for messages between steps. A save in the background uses other connections, so that the
    messages of two threads are not mixed up."""
    scale: LossScale
    shares: RowShares
    """Rows of the global batch that each device computes in the first step of a team; they may change
    later."""
    rank_driver: RankDriver = field(init=False)
    """The part of the run's driver on this rank, which is made after everything else."""
    folder_files: State = field(default_factory=dict)
    """On the main rank, the files of the Hugging Face folder that the model came from, which each save
    includes."""
    step: int = 0
    program: RunningProgram | None = None
    """The user's program that trains; None: the run has none."""
    missing: tuple[range, ...] = ()
    """Sequences among those seen whose gradients a parameter server has not received yet."""
    sequences: int = 0
    """Number of sequences that the run has seen: `step` times the batch, unless the batch was changed."""

    @property
    def text(self) -> Dataset:
        """The data of the job."""
        assert isinstance(self.dataset, Dataset), "the data are not those of a program"
        return self.dataset


def build(
    config: Config,
    plan: Plan,
    worker: Worker,
    dataset: Dataset | Samples | None = None,
    draw: bool = True,
    program: RunningProgram | None = None,
) -> Training:
    """Join the other ranks, open the data, and build the model on the mesh. With `draw`, weights get their
    initial values; without it, the caller must set them. `program` must have run up to its first batch."""
    dataset = dataset or Dataset.open(config.data, config.train.seed)
    if isinstance(dataset, Dataset):
        config = with_data_settings(config, dataset)
    of_job = ModelSpec.of(config), config.optimizer, config.train.compile
    assert (plan.model, plan.optimizer, plan.compile) == of_job, "the plan was made for another job"
    driver, train = driver_of(config), config.train
    mesh = join(worker, plan.layout, "cpu" if driver.ranks_on_host else config.run.device, plan.groups)
    if mesh.device.type == "cuda":
        _prepare_gpu(mesh.device, train.deterministic, plan.model.float8 is not None)
    # Initial weights and dropout have seeds of their own (models/unallocated.py, parallel/seeds.py).
    torch.manual_seed(train.seed)
    comm = Comm(mesh)
    # The check builds a separate model: it calls forward, which may change the state of a user's module.
    check_module(config, plan.layout)
    parallel = parallelise(plan, comm)
    optimizer = make_optimizer(
        parallel.named_parameters(), plan.optimizer, plan.model.seed, parallel.embeddings, local_slices
    )
    for part in parallel.parts:
        for compressor in part.compressors:
            optimizer.register(compressor, dict(part.model.named_parameters()))
    checkpointer = Checkpointer(mesh, config.checkpoint.background)
    talks = train.check_every > 0 or driver.talks_while_saving
    peers = Peers.create(mesh) if talks and config.checkpoint.background else checkpointer.peers
    training = Training(
        config=config,
        plan=plan,
        mesh=mesh,
        comm=comm,
        parallel=parallel,
        optimizer=optimizer,
        dataset=dataset,
        checkpointer=checkpointer,
        peers=peers,
        scale=LossScale.first(train.precision, train.initial_scale, train.scale_every),
        shares=RowShares.even(train.global_batch, driver.parts_of_batch(plan)),
        program=program,
    )
    training.rank_driver = driver.on_rank(training)
    if draw:
        start_from_seed(training)
    return training


def _prepare_gpu(device: torch.device, deterministic: bool, float8: bool) -> None:
    if deterministic:
        compute_deterministically()
    if float8:
        check_float8(device)


def check_float8(device: torch.device) -> None:
    """Refuse a GPU that does not multiply in float8."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"train.precision = 'float8': {torch.cuda.get_device_name(device)} has no float8 products, which "
            "come with Ada and Hopper GPUs; use train.precision = 'bfloat16'"
        )


def restore(training: Training, folder: str) -> None:
    """Load a checkpoint, from which the run continues."""
    manifest = read_manifest(folder)
    same_world = manifest.world == training.mesh.worker.world
    training.step, training.sequences = manifest.step, manifest.sequences
    state = training.rank_driver.state_to_fill(training, _own_state(training), manifest)
    training.checkpointer.load(folder, state, same_world)
    if training.program is not None and StateKey.program() in (contents := Contents.open(folder)).tensors:
        training.program.load_state(contents.read(StateKey.program()))
    _share_tied(training)
    training.rank_driver.state_loaded(training, state, manifest)
    training.missing = tuple(range(*bounds) for bounds in manifest.missing)
    left_out = manifest.missing and not driver_of(training.config).resumes_missing
    if left_out and training.mesh.is_main:
        count = sum(map(len, training.missing))
        log.warning(
            "%d sequences that were under way with the workers of a parameter server are left out", count
        )
    saved = manifest.loss_scale
    if saved and training.scale.dynamic and manifest.train.get("precision") == "float16":
        training.scale = replace(
            training.scale, value=float(saved["value"]), clean_steps=int(saved["clean_steps"])
        )


def start_from_seed(training: Training) -> None:
    """Start with weights that are drawn from the seed, or that a user's module gives."""
    if training.rank_driver.draws_weights(training):
        first_values(training.parallel, training.config.model, training.config.train.seed)
    training.rank_driver.weights_ready(training)


@torch.no_grad()
def start_from_pretrained(training: Training, folder: Path) -> None:
    """Start with the weights of a Hugging Face folder. Every rank reads one whole tensor at a time, and
    copies its part."""
    named: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in training.parallel.named_parameters():
        named[name].append(parameter)  # a tied weight has two, where first and last stage are on this rank
    for name, full in open_folder(folder).read():
        for parameter in named[name]:
            assign(parameter, full)
    training.rank_driver.weights_ready(training)


def keep_files(training: Training, checkpoints: Iterable[str]) -> None:
    """Load the files beside the weights in the Hugging Face folder that the model came from: from the first
    of these checkpoints that has them, else from the folder. If the run has another tokenizer, they do not
    fit the model, and are dropped. Called on the main rank.
    """
    folder = training.config.model.pretrained
    for address in checkpoints:
        with suppress(UserError):  # a damaged checkpoint was reported before
            training.folder_files = training.folder_files or files_of_checkpoint(Contents.open(address))
    if not training.folder_files and folder is not None:
        training.folder_files = files_of_folder(Path(folder))
    if not isinstance(training.dataset, Dataset):
        return
    if not has_tokenizer(
        training.folder_files, training.dataset.streams[0].tokens.index.tokenizer_fingerprint
    ):
        log.warning(
            "the data have another tokenizer than the Hugging Face folder of the model: its files are "
            "not kept"
        )
        training.folder_files = {}
    if training.folder_files:
        training.folder_files |= _chat_template(training)


def _chat_template(training: Training) -> State:
    """Return the chat template of the data as a file, because the model learns to answer by it; nothing if
    the model's folder has the same template."""
    folder = training.config.model.pretrained
    of_folder = find_template(Path(folder) / TOKENIZER) if folder is not None else None
    streams = [stream.tokens for stream in training.text.streams if stream.tokens.index.holds_answers]
    templates = (find_template(tokens.folder) for tokens in streams)
    of_data = next((template for template in templates if template is not None), None)
    if of_data is None or (of_folder is not None and of_folder.source == of_data.source):
        return {}
    return {file_key(TEMPLATE): torch.frombuffer(bytearray(of_data.source.encode()), dtype=torch.uint8)}


def save(training: Training, wait: bool = True) -> str:
    """Write a checkpoint of the present step, in the background unless `wait` is set, and return its
    address."""
    config = training.config
    retention = Retention(config.checkpoint.keep, config.checkpoint.keep_every)
    state = {**_state(training), **training.folder_files}
    if training.program is not None and training.mesh.is_main:
        state[StateKey.program()] = training.program.saved_state()
    address = training.checkpointer.save(
        checkpoint_folder(config), state, _manifest(training), retention, wait
    )
    training.rank_driver.state_copied(training)
    return address


def keep_copy(training: Training, copies: MemorySnapshots) -> None:
    """Exchange copies of the present state with a neighbour, if a copy is due."""
    if not copies.due(training.mesh, training.step):
        return
    missing = [(rows.start, rows.stop) for rows in training.missing]
    extras = {
        "step": training.step,
        "sequences": training.sequences,
        "missing": missing,
        "scale": asdict(training.scale),
    }
    if training.program is not None:
        extras["program"] = bytes(training.program.saved_state().numpy()).hex()
    copies.take(training.mesh, training.step, _state_and_random(training), extras)


def recall(training: Training, copies: MemorySnapshots) -> bool:
    """Restore the state from copies in the workers' memories, if these are complete and not older than the
    newest checkpoint. Return whether that was done."""
    if not copies.every:
        return False
    state = _state_and_random(training)
    copies.join(training.mesh, state)
    step = copies.newest(training.mesh)
    if step is None or step < training.checkpointer.newest_step(checkpoint_folder(training.config)):
        return False
    extras = copies.restore(training.mesh, step, state)
    set_random_state(state, training.mesh.worker.rank, training.mesh.device)
    _share_tied(training)
    training.step, training.sequences, training.scale = (
        extras["step"],
        extras["sequences"],
        LossScale(**extras["scale"]),
    )
    training.missing = tuple(range(*bounds) for bounds in extras["missing"])
    if training.program is not None:
        training.program.load_state(torch.tensor(list(bytes.fromhex(extras["program"])), dtype=torch.uint8))
    return True


def _state_and_random(training: Training) -> State:
    return {**_state(training), **random_state(training.mesh.worker.rank, training.mesh.device)}


def _state(training: Training) -> State:
    return training.rank_driver.state(training, _own_state(training))


def _own_state(training: Training) -> State:
    parallel = training.parallel
    state = state_of(parallel.named_parameters(), training.optimizer, parallel.named_buffers())
    return {**state, **dict(parallel.residuals())}


@torch.no_grad()
def _share_tied(training: Training) -> None:
    """Copy each tied weight and its state to its second copy, if this rank has first and last stage. Loading
    fills only one of the two copies."""
    loaded = dict(training.parallel.named_parameters())
    for name, copy in training.parallel.named_parameters():
        if name in loaded and loaded[name] is not copy:
            local(copy).copy_(local(loaded[name]))
            if copy.requires_grad:
                moments = training.optimizer.state[loaded[name]]
                training.optimizer.state[copy] = {
                    key: value.detach().clone() for key, value in moments.items()
                }


def _manifest(training: Training) -> Manifest:
    config = training.config
    return Manifest(
        step=training.step,
        sequences=training.sequences,
        missing=tuple((rows.start, rows.stop) for rows in training.missing),
        model=config.model.settings(),
        train=config.train.model_dump(mode="json"),
        optimizer=config.optimizer.model_dump(mode="json"),
        data=config.data.model_dump(mode="json"),
        layout=training.plan.layout.model_dump(),
        loss_scale={"value": training.scale.value, "clean_steps": training.scale.clean_steps},
        world=training.mesh.worker.world,
        torch=str(torch.__version__),
        files={},
        groups=training.rank_driver.groups_in_checkpoint(training),
        under_way=training.rank_driver.under_way,
    )
