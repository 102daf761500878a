"""A parameter server: workers send gradients, each at its own pace, and servers make the updates.

The servers are the ranks of the run. They shard weights and optimizer states as ZeRO-3 does, in host memory.
The workers are *loose*: each has a whole model on its own device, and losing one does not end the team. A
global batch is cut into portions; a worker asks for one, pulls the weights and pushes its gradient
(asynchronous/). docs/asynchronous.md tells what staleness costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.drivers.driver import LooseWorker, RankDriver, WorkerCounts, sums_gradients_only
from shardwise.drivers.server_settings import TABLE, ServerSettings, server_settings
from shardwise.drivers.whole_models import WholeModels, no_experts, no_scales, splits_model
from shardwise.errors import UserError
from shardwise.plurals import counted

if TYPE_CHECKING:
    from shardwise.config import Config, Layout, Train
    from shardwise.data import Dataset
    from shardwise.mesh import Worker
    from shardwise.optimizers import Optimizer
    from shardwise.plans import Plan
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.search.planner import Planner
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


def _damping(server: ServerSettings) -> Iterator[str]:
    if server.damping and server.max_staleness == 0:
        yield (
            "server.damping = true: with server.max_staleness = 0 no gradient is stale; raise that, or leave "
            "it out"
        )


def _prediction(optimizer: Optimizer, server: ServerSettings) -> Iterator[str]:
    if server.predicts and optimizer.momentum_per_step is None:
        yield (
            f"server.prediction = true: optimizer.name = {optimizer.name!r} has no momentum by which weights "
            "could be predicted; set server.prediction = false, or server.max_staleness = 0"
        )


def _portions(train: Train, server: ServerSettings) -> Iterator[str]:
    from shardwise.config import divisors

    if server.portions and train.global_batch % server.portions:
        yield (
            f"server.portions = {server.portions}: does not divide train.global_batch = "
            f"{train.global_batch}; use one of {', '.join(map(str, divisors(train.global_batch)))}"
        )


def _layout(train: Train, layout: Layout) -> Iterator[str]:
    yield from splits_model(train, layout)


class ParameterServer(WholeModels):
    """Workers send gradients to servers, each worker at its own pace."""

    name = TABLE
    summary = "a parameter server that workers bring gradients to, each at its own pace"
    settings = ServerSettings
    settings_summary = "a parameter server"
    rules = (_damping, _prediction, _portions, _layout, no_scales, sums_gradients_only, no_experts)
    has_loose_workers = True
    resumes_missing = True

    def sums_gradients(self, layout: Layout) -> bool:
        """Return True: servers sum the gradients of all workers."""
        return True

    def problems_of_frozen(self, module: str, parameter: str) -> Iterator[str]:
        """Refuse frozen parameters, because servers send and sum all parameters."""
        yield (
            f"train.driver = 'server': {module} has frozen parameters ({parameter}), and servers hand out "
            "and sum all of them; use 'synchronous', 'local' or 'hogwild'"
        )

    def check_worker_counts(self, config: Config, counts: WorkerCounts, least_given: int | None) -> None:
        """Refuse --min-workers, and a batch that does not divide into portions."""
        count = server_settings(config).portions or counts.most
        if least_given is not None:
            raise UserError(
                "--min-workers: workers of a parameter server come and go as they like; leave it out"
            )
        if config.train.global_batch % count:
            raise UserError(
                f"train.global_batch = {config.train.global_batch}: does not divide into {count} portions, "
                "one for each worker; give server.portions, or another batch"
            )

    def processes(
        self, config: Config, counts: WorkerCounts, first_host: bool
    ) -> tuple[Config, WorkerCounts]:
        """Return the job with its number of portions filled in, and the counts with the servers added."""
        table = server_settings(config)
        filled = table.model_copy(update={"portions": table.portions or counts.most})
        servers = table.servers
        here = counts.here + (servers if first_host else 0)
        return config.model_copy(update={self.name: filled}), WorkerCounts(
            here, servers, counts.most + servers
        )

    def job_to_plan(self, config: Config) -> Config:
        """Return the job of the servers, which shard states and evaluate one portion at a time."""
        from shardwise.config import Layout

        table = server_settings(config)
        layout = Layout(data=table.servers, zero=3 if table.servers > 1 else 0)  # type: ignore[call-arg]
        rows = config.train.global_batch // (table.portions or 1)  # rows that they evaluate at a time
        batch = {"global_batch": table.servers * rows, "micro_batch": rows}
        return config.model_copy(update={"layout": layout, "train": config.train.model_copy(update=batch)})

    def first_plan(self, planner: Planner) -> Plan:
        """Return the plan on all servers."""
        return planner.planned(server_settings(planner.config).servers)

    def plan_on(self, planner: Planner, devices: int, least: int) -> Plan | None:
        """Return the first plan, because the number of servers is constant; None: no device is left for a
        worker."""
        return planner.first if devices > server_settings(planner.config).servers else None

    def parts_of_batch(self, plan: Plan) -> int:
        """Return 1, because servers do not split a batch: workers take portions of it."""
        return 1

    def describe_devices(self, training: Training, lines: dict[str, str]) -> dict[str, str]:
        """Return lines about the servers, the portions and the staleness instead."""
        config = training.config
        bound = server_settings(config).staleness_bound
        cut = counted(server_settings(config).portions or 1, "portion")
        batch = f"{counted(config.train.global_batch, 'sequence')} of {config.data.sequence_length}"
        return {
            "servers": f"{training.mesh.worker.world}, in host memory; workers as they come",
            "batch": f"{batch} in {cut}; staleness {'unbounded' if bound is None else f'{bound} at most'}",
        }

    def on_rank(self, training: Training) -> ServerRank:
        """Return a rank that is a server."""
        return ServerRank()

    def loose_worker(self, config: Config, worker: Worker, dataset: Dataset) -> LooseWorker:
        """Return a worker that computes gradients for the servers."""
        from shardwise.drivers.contributor import Contributor

        return Contributor(config, worker, dataset)


class ServerRank(RankDriver):
    """A server, which sums the gradients of its workers."""

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return the sums of gradients that workers send."""
        from shardwise.drivers.contributions import Contributions

        assert link is not None, "a server has to learn that the run is to stop while it waits for workers"
        return Contributions(
            training,
            stop_asked=lambda: link.wish() is not None,
            waiting=lambda: link.progress("wait", training.step),
        )

    def rows(self, training: Training) -> str:
        """Return a phrase for a server, which has no rows of its own."""
        return "gradients that workers brought"
