"""A step from the time of its pipeline: what links hold up, and what hides behind the last backward.

How long ranks take to go through their stages is told in three ways: by a closed form, which takes stages for
equal; by a bound below which no schedule can be played; and by playing the schedule (search/search.py). What
the links make of it is said here, once for all three:

    pipeline = max(ranks going through their stages + messages they wait for,
                   busiest link + bubble of equal stages)
    step     = pipeline + messages while the pipeline fills and drains
               + the exposed part of the collectives that run once a step + everything else

Where a link is busier than the slowest rank, every rank runs at its pace, and how unevenly the stages are cut
matters no more. What comes once a step hides behind the last backward of the blocks, which takes a share of
the pipeline's time, waits included; joining replicas comes after the sums inside of them. Without a pipeline
the same holds of one rank that waits for nobody.

Why in this form: these are sums and maxima of times that a better machine makes shorter or leaves, and of the
pipeline's time less can hide than it has. So no better machine is predicted to be slower. What a schedule
takes longer than its slowest rank, put on top of a link's time, would not do: that grows wherever the slowest
rank gains more than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from shardwise.config.schedules import is_interleaved, schedule_value, splits_backward
from shardwise.cost.cluster import Cluster
from shardwise.cost.footprint import Holdings
from shardwise.cost.price import Busy, Priced
from shardwise.cost.software import Software
from shardwise.cost.space import Array, Space
from shardwise.plan.step_terms import TERMS

CONTENTION = 0.12
"""Share of the hidden communication's time by which it slows the computing beside it (Calculon: 0.15 on
NVLink, 0.02 on the network)."""
BACKWARD = 0.7
"""Share of backward in a block's seconds: it has twice the products and 2.5 times the attention."""


@dataclass(frozen=True)
class Sums:
    """Collectives of an axis that run once a step, beside its last backward."""

    seconds: Array
    beside: Array
    """Part of the seconds in which the device can compute."""

    @classmethod
    def of(cls, links: Priced, axis: str) -> Sums:
        """Return the collectives of an axis that run once a step."""
        return cls(links.seconds(axis, "once"), links.beside(axis, "once"))

    def exposed(self, room: Array, stack: Software) -> Array:
        """Return the seconds that this much work does not hide."""
        return exposed(self.seconds, self.beside, room, stack)


@dataclass(frozen=True)
class StepTerms:
    """All of a step but what depends on how long its ranks take to go through their stages."""

    terms: dict[str, Array]
    """Seconds that do not depend on it; `seconds` adds the others."""
    average: Array
    """Part of the terms that is the average rank's own work in all micro-batches."""
    filling: Array
    """Seconds of messages while the pipeline fills and drains."""
    waits: Array
    """Seconds of messages between stages that the program waits for."""
    held_up: Array
    """Seconds of the pipeline if its busiest link decides its pace."""
    share: Array
    """Share of the pipeline's time that the last backward and the wait before it take."""
    taken: Array
    """Seconds of that in which nothing of it hides: those of the embedding and the head, and where a CPU's
    network is in use."""
    data: Sums
    replica: Sums
    busiest_link: Array
    """Seconds in which the busiest link of any device carries bytes: no step is shorter."""

    def seconds(self, slowest: Array, ranks: Array, cluster: Cluster, stack: Software) -> dict[str, Array]:
        """The whole step by term, where the slowest rank's own work takes so long, and all ranks together
        with their waits for each other."""
        pipeline = np.maximum(ranks + self.waits, self.held_up)
        room = np.maximum(self.share * (pipeline - self.waits) - self.taken, 0.0)
        added = {
            "data": self.data.exposed(room, stack),
            "replica": self.replica.exposed(np.maximum(room - self.data.seconds, 0.0), stack),
            "imbalance": slowest - self.average,
            "bubble": ranks - slowest,
            "pipeline_sends": self.filling + pipeline - ranks,
        }
        whole = {**self.terms, **{name: self.terms.get(name, 0.0) + value for name, value in added.items()}}
        seconds = {name: whole[name] * cluster.corrections.get(name, 1.0) for name in TERMS if name in whole}
        late = np.maximum(self.busiest_link - total(seconds), 0.0)
        return {**seconds, "links": late * cluster.corrections.get("links", 1.0)}


def exposed(seconds: Array, beside: Array, work: Array, stack: Software) -> Array:
    """What is left of communication, some of which could run beside so much work, and what it slows that work
    by."""
    return seconds - (1 - CONTENTION) * stack.overlap_data * np.minimum(beside, work)


def total(terms: Mapping[str, Array]) -> Array:
    """Return the sum of all terms."""
    first, *others = terms.values()
    return sum(others, first)


def step_of(
    terms: dict[str, Array],
    average: Array,
    ends: Array,
    space: Space,
    cluster: Cluster,
    stack: Software,
    held: Holdings,
    links: Priced,
) -> StepTerms:
    """Return a step with these terms; `average` and `ends` are seconds of a micro-batch on an average rank,
    and in the embedding and head.

    Messages are exposed while the pipeline fills and drains; of the rest, two for each stage and micro-batch,
    those that the program waits for. The gradient of a tied embedding, and the numbers of a step, are sent
    while the pipeline drains. A CPU worker has one network, which may be busy with what it sends in each
    micro-batch.
    """
    m, piped = space.accumulation, space.pipeline > 1
    idle = bubble(space, np.ones_like(average))
    held_up = np.where(piped, steady(space, held, links) + idle * average, 0.0)
    filling = 2 * (space.pipeline - 1) * links.message
    waits = 2 * (1 - stack.overlap_sends * cluster.device.overlap) * m * space.stages_per_rank * links.message
    backwards = BACKWARD * np.where(piped, np.minimum(m, 2), 1)
    sent = sum(links.inside_blocks(axis) for axis in ("tensor", "context", "expert", "data"))
    taken = backwards * (ends if cluster.device.overlap else ends + sent / m)
    sums = Sums.of(links, "data"), Sums.of(links, "replica")
    return StepTerms(
        terms,
        m * average,
        filling,
        waits,
        held_up,
        backwards / (m + idle),
        taken,
        *sums,
        _busiest(space, held, links),
    )


def bubble(space: Space, slowest: Array) -> Array:
    """Seconds for which ranks wait where equal stages take so long on each of them. The finalists of a search
    are played through action by action instead (plan/timeline.py)."""
    factor = schedule_value(space.schedule, lambda facts: facts.bubble)
    stages = np.where(is_interleaved(space), space.stages_per_rank, 1)
    idle: Array = (space.pipeline - 1) * slowest * factor / stages
    return idle


def least_ranks(
    space: Space, held: Holdings, layer: Array, embedding: Array, head: Array, slowest: Array
) -> Array:
    """Seconds below which no schedule can be played. A rank begins when the first micro-batch has come
    through all stages before its own, and where backward is not split, those still have their backward to do
    when it has ended.
    """
    cut, m = held.cut, space.accumulation
    split = np.where(splits_backward(space), 1 / 3, 1.0)
    middle = m * cut.middle * layer + split * (embedding + cut.before_middle * layer)
    last = m * (cut.last * layer + head) + split * (embedding + cut.before_last * layer)
    ended = np.where(held.cut.folded, middle, np.maximum(middle, last))
    return np.where(space.pipeline > 1, np.maximum(ended, m * slowest), m * slowest)


def steady(space: Space, held: Holdings, links: Priced) -> Array:
    """Seconds in which the busiest link carries what a pipeline's micro-batches send, in the blocks and
    between the stages."""
    return reduce(
        np.maximum,
        (_of_any_rank(busy, busy.blocks + busy.stages, space, held, links) for busy in links.busy.values()),
    )


def _busiest(space: Space, held: Holdings, links: Priced) -> Array:
    """Seconds of a step in which the busiest link carries bytes."""
    return reduce(
        np.maximum, (_of_any_rank(busy, busy.total, space, held, links) for busy in links.busy.values())
    )


def _of_any_rank(busy: Busy, first: Array, space: Space, held: Holdings, links: Priced) -> Array:
    """Seconds of a link: the first rank's, or those of a rank between the ends, which sends two ways for each
    of its stages."""
    messages = (
        2 * held.cut.stages * space.accumulation / np.maximum(links.messages, 1.0)
    )  # for each of the first rank's
    middle = held.cut.middle / held.cut.first * busy.blocks + messages * busy.stages
    return np.where(space.pipeline > 2, np.maximum(first, middle), first)
