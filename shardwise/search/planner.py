"""The planner of a run: it makes the first team's plan, and the plan of each later team of another size.

The process that starts the workers makes the plan before it starts any of them, and sends it to them. Workers
that torchrun or srun starts have no such process. There each rank makes the plan from the same job by the
same function, which needs no peers, so that each rank refuses a bad job at once. The ranks compare their
plans before the first step (train/run.py).

If the job gives no layout and the cluster is known, a search over all layouts decides (search/). The rest is
decided by the rules of plans/choose.py. On fewer workers the plan has the nearest layout that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.config import Config
from shardwise.config.parameters import ModuleParameters
from shardwise.cost.buckets import bucket_bytes
from shardwise.cost.cluster import Cluster
from shardwise.drivers.registry import driver_of
from shardwise.errors import UserError
from shardwise.plans import OriginalJob, Plan, choose, fit
from shardwise.search.forecast import forecast, is_open, plan_job


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one job on one kind of device."""

    config: Config
    """The job as the user wrote it."""
    devices: int
    """Largest number of devices that the run will have."""
    memory_bytes: float | None
    """Memory of each device; None if it is unknown."""
    parameters: ModuleParameters | None = None
    """Numbers of parameters of a user's module; None: the model is ours."""
    cluster: Cluster | None = None
    cluster_file: str | None = None
    searches: bool = False
    """Whether the planner is to decide what the job leaves open."""
    _plans: dict[int, Plan | None] = field(default_factory=dict, compare=False, repr=False)
    """Plans that were made already, by the number of devices."""

    @cached_property
    def first(self) -> Plan:
        """The plan on all devices. Raises a `ConfigError` if there is none."""
        plan = self._plans[self.devices] = driver_of(self.config).first_plan(self)
        return plan

    def on(self, devices: int, least: int) -> Plan | None:
        """Return the plan for as many of these devices as can be used; None if that is fewer than `least`."""
        if devices not in self._plans:
            self._plans[devices] = driver_of(self.config).plan_on(self, devices, least)
        return self._plans[devices]

    def planned(self, devices: int) -> Plan:
        """Return the plan of the job on exactly these devices. Raises a `ConfigError` if there is none."""
        config, asked = self._job_to_plan
        return self._predicted(choose(config, devices, self.memory_bytes, self.parameters, asked))

    def fitted(self, devices: int, least: int) -> Plan | None:
        """Return the plan of the nearest layout on at most these devices; None below `least`."""
        config, asked = self._job_to_plan
        plan = fit(config, devices, least, self.memory_bytes, self.parameters, asked)
        return self._predicted(plan) if plan else None

    @property
    def searched(self) -> str | None:
        """Result of the search and why it is the best; None if nothing was searched."""
        config, asked = self._job_to_plan
        if asked is None:
            return None
        whys = (f"{key} {getattr(config.layout, key) or 'none'}: {why}" for key, why in asked.whys.items())
        return "; ".join([asked.why, *whys])

    @cached_property
    def _job_to_plan(self) -> tuple[Config, OriginalJob | None]:
        """The job with the decisions of a search, from which plans are made, and the written job."""
        config = driver_of(self.config).job_to_plan(self.config)
        if not self.searches or self.cluster is None:
            return config, None
        return plan_job(config, self.cluster.with_devices(self.devices), self.devices)

    def _predicted(self, plan: Plan) -> Plan:
        """Return the plan with a prediction of its step, if the cluster is known. A run that cannot be
        predicted starts all the same."""
        plan = replace(plan, cluster_file=self.cluster_file, bucket_bytes=self._bucket_bytes(plan))
        countable = self.config.model.module is None and driver_of(self.config).is_predicted
        if self.cluster is None or not countable:
            return plan
        try:
            job, cluster = plan.applied_to(self.config), self.cluster.with_devices(plan.world)
            choices = plan.layout, plan.micro_batch, plan.accumulation
            return replace(plan, predicted=forecast(job, *choices, cluster, plan.bucket_bytes))
        except (UserError, KeyError, ValueError) as error:
            return replace(plan, unpredicted=str(error))

    def _bucket_bytes(self, plan: Plan) -> int | None:
        """Return the size of gradient buckets for the cluster that the job names; None: torch's default.

        Measurements of this machine are not used. Another bucket size changes the last bits of sums, and a
        run must not depend on how busy the machine was."""
        engine = plan.engine
        named = self.config.cluster.file is not None or self.config.cluster.preset is not None
        if self.cluster is None or not named or engine.sharded or engine.single:
            return None
        gradients = plan.state_width * (plan.parameters - plan.frozen)
        compressed = plan.layout.compression is not None
        return bucket_bytes(self.cluster.with_devices(plan.world), plan.world, gradients, compressed)


def left_to_the_planner(config: Config, devices: int, cluster_is_named: bool) -> bool:
    """Return whether a search decides: the job leaves out the whole layout, or the micro-batch on a cluster
    that it names."""
    if config.model.module is not None or not driver_of(config).lockstep:
        return False
    return (is_open(config.layout) and devices > 1) or (cluster_is_named and config.train.micro_batch is None)
