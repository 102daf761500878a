"""The time of a step, from the time that pipeline ranks need for their stages and from the time of links.

The time that ranks need for their stages comes from one of three places: a closed form, which assumes equal
stages; a lower bound; or a simulation of the schedule (search/search.py). This file adds the links, in the
same way for all three:

    pipeline = max(time of the ranks for their stages + messages they wait for,
                   busiest link + bubble of equal stages)
    step     = pipeline + messages while the pipeline fills and drains
               + the exposed part of the collectives that run once a step + everything else

If a link is busier than the slowest rank, every rank runs at the pace of that link, and it no longer matters
how unevenly the stages are cut. Collectives that run once a step hide behind the last backward of the blocks,
which takes a share of the pipeline's time, including its waits. Replicas are joined after the sums inside of
them. Without a pipeline the same formulas hold for one rank, which waits for nobody.

With this form no better machine is predicted to be slower, because all terms are sums and maxima of times
that a better machine shortens or leaves, and what hides is never longer than the pipeline. That would not
hold for the time of a link plus the time that a schedule takes longer than its slowest rank: this difference
grows if the slowest rank gains more than the others.
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
from shardwise.plans.step_terms import TERMS

CONTENTION = 0.12
"""Seconds by which each second of hidden communication slows the computing beside it (Calculon: 0.15 on
NVLink, 0.02 on the network)."""
BACKWARD = 0.7
"""Share of backward in a block's seconds: it has twice the products and 2.5 times the attention."""


@dataclass(frozen=True)
class Sums:
    """Collectives of an axis that run once a step, beside the last backward."""

    seconds: Array
    beside: Array
    """Part of these seconds in which the device can compute."""

    @classmethod
    def of(cls, links: Priced, axis: str) -> Sums:
        """Return the collectives of an axis that run once a step."""
        return cls(links.seconds(axis, "once"), links.beside(axis, "once"))

    def exposed(self, work: Array, stack: Software) -> Array:
        """Return the seconds that do not hide behind this many seconds of work."""
        return exposed(self.seconds, self.beside, work, stack)


@dataclass(frozen=True)
class StepTerms:
    """The parts of a step that do not depend on how long its ranks need for their stages."""

    terms: dict[str, Array]
    """Seconds by term; `seconds` adds the parts that depend on the ranks."""
    average: Array
    """Part of these terms that is the average rank's own work in all micro-batches."""
    filling: Array
    """Seconds of messages while the pipeline fills and drains."""
    waits: Array
    """Seconds of messages between stages that the program waits for."""
    held_up: Array
    """Seconds of the pipeline if its busiest link decides its pace."""
    share: Array
    """Share of the pipeline's time that the last backward and the wait before it take."""
    taken: Array
    """Seconds of that share behind which sums cannot hide: those of the embedding and the head, and those in
    which the network of a CPU worker is in use."""
    data: Sums
    replica: Sums
    busiest_link: Array
    """Seconds in which the busiest link of any device carries bytes: no step is shorter."""

    def seconds(self, slowest: Array, ranks: Array, cluster: Cluster, stack: Software) -> dict[str, Array]:
        """Return the seconds of the whole step by term.

        `slowest` are the seconds of the slowest rank's own work, and `ranks` those that all ranks together
        need, with their waits for each other.
        """
        pipeline = np.maximum(ranks + self.waits, self.held_up)
        last_backward = np.maximum(self.share * (pipeline - self.waits) - self.taken, 0.0)
        rest = np.maximum(last_backward - self.data.seconds, 0.0)
        added = {
            "data": self.data.exposed(last_backward, stack),
            "replica": self.replica.exposed(rest, stack),
            "imbalance": slowest - self.average,
            "bubble": ranks - slowest,
            "pipeline_sends": self.filling + pipeline - ranks,
        }
        whole = {**self.terms, **{name: self.terms.get(name, 0.0) + value for name, value in added.items()}}
        seconds = {name: whole[name] * cluster.corrections.get(name, 1.0) for name in TERMS if name in whole}
        late = np.maximum(self.busiest_link - total(seconds), 0.0)
        return {**seconds, "links": late * cluster.corrections.get("links", 1.0)}


def exposed(seconds: Array, beside: Array, work: Array, stack: Software) -> Array:
    """Return the seconds of communication that are not hidden, plus those by which the rest slows the work.

    `beside` is the part of its `seconds` that can run beside computing, and `work` the seconds of computing.
    """
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
    """Return a step with these terms. `average` are the seconds of a micro-batch on an average rank, and
    `ends` those in the embedding and the head.

    Messages between stages are exposed while the pipeline fills and drains. Of the others, two for each stage
    and micro-batch, those are exposed that the program waits for. The gradient of a tied embedding and the
    numbers that all ranks share are sent while the pipeline drains. On a CPU worker, the messages of each
    micro-batch use the same network.
    """
    m, piped = space.accumulation, space.pipeline > 1
    idle = bubble(space, np.ones_like(average))
    held_up = np.where(piped, steady(space, held, links) + idle * average, 0.0)
    filling = 2 * (space.pipeline - 1) * links.message
    waits = 2 * (1 - stack.overlap_sends * cluster.device.overlap) * m * space.stages_per_rank * links.message
    backwards = BACKWARD * np.where(piped, np.minimum(m, 2), 1)
    sent = sum(links.inside_blocks(axis) for axis in ("tensor", "context", "expert", "data"))
    taken = backwards * (ends if cluster.device_type == "cuda" else ends + sent / m)
    return StepTerms(
        terms,
        average=m * average,
        filling=filling,
        waits=waits,
        held_up=held_up,
        share=backwards / (m + idle),
        taken=taken,
        data=Sums.of(links, "data"),
        replica=Sums.of(links, "replica"),
        busiest_link=_busiest(space, held, links),
    )


def bubble(space: Space, slowest: Array) -> Array:
    """Return the seconds for which ranks wait if equal stages take `slowest` seconds on each rank.

    For the best candidates of a search, the schedule is simulated instead (plans/timeline.py).
    """
    factor = schedule_value(space.schedule, lambda facts: facts.bubble)
    stages = np.where(is_interleaved(space), space.stages_per_rank, 1)
    idle: Array = (space.pipeline - 1) * slowest * factor / stages
    return idle


def least_ranks(
    space: Space, held: Holdings, layer: Array, embedding: Array, head: Array, slowest: Array
) -> Array:
    """Return a lower bound on the seconds of a pipeline.

    A rank begins when the first micro-batch has passed all stages before its own. If backward is not split,
    these stages still have to do their backward when the rank has ended.
    """
    cut, m = held.cut, space.accumulation
    split = np.where(splits_backward(space), 1 / 3, 1.0)
    middle = m * cut.middle * layer + split * (embedding + cut.before_middle * layer)
    last = m * (cut.last * layer + head) + split * (embedding + cut.before_last * layer)
    ended = np.where(held.cut.is_in_a_v, middle, np.maximum(middle, last))
    return np.where(space.pipeline > 1, np.maximum(ended, m * slowest), m * slowest)


def steady(space: Space, held: Holdings, links: Priced) -> Array:
    """Return the seconds in which the busiest link carries bytes of micro-batches, in blocks and between
    stages."""
    seconds = [
        _of_busiest_rank(busy, busy.blocks + busy.stages, space, held, links) for busy in links.busy.values()
    ]
    return reduce(np.maximum, seconds)


def _busiest(space: Space, held: Holdings, links: Priced) -> Array:
    """Return the seconds of a step in which the busiest link carries bytes."""
    seconds = [_of_busiest_rank(busy, busy.total, space, held, links) for busy in links.busy.values()]
    return reduce(np.maximum, seconds)


def _of_busiest_rank(busy: Busy, first: Array, space: Space, held: Holdings, links: Priced) -> Array:
    """Return the seconds of a link: those of the first rank, or of a rank between the ends, which sends in
    both directions for each of its stages."""
    # Messages for each one of the first rank.
    messages = 2 * held.cut.stages * space.accumulation / np.maximum(links.messages, 1.0)
    middle = held.cut.middle / held.cut.first * busy.blocks + messages * busy.stages
    return np.where(space.pipeline > 2, np.maximum(first, middle), first)
