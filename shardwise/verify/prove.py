"""The proof from end to end: one device, the layout, the verdict, and if it fails, where and why.

    reference (one process of ours, or plain torch) → file → every rank compares → verdict
    if that fails: once more, module by module → diagnosis

Costs: K steps on one device and K on the layout, all on this machine's cores (or the layout's on its GPUs,
where that is asked for); memory for the model as often as there are processes; on disk, for a while, K + 1
copies of the model in float64.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.config import AXES, Config
from shardwise.data import Dataset, check_vocabulary, with_data_settings
from shardwise.errors import UserError
from shardwise.plurals import counted
from shardwise.verify.diagnose import MICRO_BATCHES, Diagnosis, diagnose, diagnose_shared
from shardwise.verify.job import Against, Dtype, ProofJob, Sabotage, check_sabotage, prepare_proof
from shardwise.verify.reports import HELD_OUT, RankReport, Reference, ShortSum
from shardwise.verify.rows import ProofDataset, Reached, what_is_reached
from shardwise.verify.verdict import CompressedVerdict, Verdict, judge, judge_compressed, what_is_compressed
from shardwise.verify.workers import Workers

REFER, COMPARE = "shardwise.verify.measure:write_reference", "shardwise.verify.measure:compare_with_reference"
REFER_PLAIN = "shardwise.verify.measure:write_plain_reference"
REFER_TRACE, COMPARE_TRACE = (
    "shardwise.verify.localise:write_reference_trace",
    "shardwise.verify.localise:compare_traces",
)
COMPRESSED = "shardwise.verify.compressed:measure_compressed"
REFER_SUMS = COMPARE_SUMS = "shardwise.verify.sums:short_sums"
REFERENCE_FILE = "reference.pt"
PLAIN_FILE = "plain.pt"


@dataclass(frozen=True)
class ProofResult:
    """What a proof came to."""

    proof: ProofJob
    shrunk: dict[str, Any] | None
    verdict: Verdict
    reference: Reference
    reports: list[RankReport]
    diagnosis: Diagnosis | None
    seconds: float
    against: Against
    reached: Reached
    compressed: tuple[CompressedVerdict, ...] = ()

    @property
    def sabotaged(self) -> dict[str, Any] | None:
        """What was broken on purpose."""
        return next((report.sabotaged for report in self.reports if report.sabotaged), None)

    @property
    def unnoticed(self) -> bool:
        """Something was broken on purpose, and the proof passes all the same."""
        return self.sabotaged is not None and self.verdict.passes

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        proof, verdict = self.proof, self.verdict
        rows = [error.to_json(proof.dtype) for error in verdict.errors]
        parameters = [row for row in rows if row["parameter"]]
        kept = ("relative_error", "rounding_units", "step", "ranks")
        numbers = {row["quantity"]: {key: row[key] for key in kept} for row in rows if not row["parameter"]}
        parallel = self._parallel_losses()
        worst = verdict.errors[0].to_json(proof.dtype)
        return {
            "pass": verdict.passes,
            "layout": proof.plan.layout.model_dump(),
            "world": proof.world,
            "dtype": proof.dtype,
            "device": proof.config.run.device,
            "against": self.against,
            "steps": proof.steps,
            "loss": {
                "reference": self.reference.losses[-1],
                "parallel": parallel[-1],
                **numbers["loss"],
                "by_step": [list(pair) for pair in zip(self.reference.losses, parallel, strict=True)],
            },
            "gradient_norm": {"reference": self.reference.norms, **numbers["gradient norm"]},
            "held_out_loss": numbers.get(HELD_OUT),
            "worst": worst,
            "faults": list(verdict.faults),
            "parameters": parameters,
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_json(),
            "sabotage": self.sabotaged,
            "sabotage_found": None if self.sabotaged is None else not self.unnoticed,
            "reached": self.reached.to_json(),
            "compression": [asdict(verdict) for verdict in self.compressed],
            "shrunk": None if self.shrunk is None else {key: list(pair) for key, pair in self.shrunk.items()},
            "seconds": round(self.seconds, 3),
        }

    def _parallel_losses(self) -> list[float]:
        """Of each step, from the rank that is furthest off."""
        by_step = zip(*(report.losses for report in self.reports), strict=True)
        return [
            max(losses, key=lambda loss: abs(loss - reference))
            for losses, reference in zip(by_step, self.reference.losses, strict=True)
        ]


def prove(
    config: Config,
    steps: int = 3,
    dtype: Dtype = "float64",
    sabotage: Sabotage | None = None,
    preparing: Callable[[], AbstractContextManager[Callable[[int, int], None] | None]] = nullcontext,
    say: Callable[[str], None] = lambda message: None,
    against: Against = "one-device",
    workers: Workers | None = None,
) -> ProofResult:
    """Run a job on its layout and on one device, or in plain torch, and compare. While text is tokenised,
    `preparing()` gives what hears of it; `say` hears of the stages. `workers`: as many as the layout needs or
    more, where there are some already."""
    started = time.monotonic()
    if against == "plain":
        _check_plain(config, dtype)
    proof, shrunk = prepare_proof(config, steps, dtype)
    if sabotage is not None:
        check_sabotage(sabotage, proof)
    with preparing() as progress:
        dataset = Dataset.open(proof.config.data, proof.config.train.seed, progress)
    embedded = _check_module(replace(proof, config=with_data_settings(proof.config, dataset)))
    check_vocabulary(dataset, proof.config.model.vocabulary)
    if proof.config.model.module is not None:
        proof = replace(proof, ids=min(embedded or dataset.vocabulary, proof.ids))
    with Workers(proof.world) if workers is None else nullcontext(workers) as workers:
        say(f"{counted(steps, 'step')} {'in plain torch' if against == 'plain' else 'on one device'}")
        path = workers.folder / (PLAIN_FILE if against == "plain" else REFERENCE_FILE)
        refer = REFER_PLAIN if against == "plain" else REFER
        (reference,) = workers.run(refer, proof.on_one_device("float64"), path, on=1)
        cost = None
        if dtype != "float64":
            say(f"{counted(steps, 'step')} on one device in {dtype}, for the cost of rounding")
            (cost,) = workers.run(COMPARE, proof.on_one_device(dtype), path, reference, on=1)
        say(f"{counted(steps, 'step')} on {counted(proof.world, 'process')}")
        reports = workers.run(COMPARE, proof, path, reference, sabotage, on=proof.world)
        verdict = judge(reports, reference, cost, dtype)
        diagnosis = None
        if not verdict.passes:
            search = _Search(workers, proof, sabotage, say)
            localise = search.in_shared if against == "plain" else search.in_layout
            diagnosis = localise(verdict, reference, reports)
        if verdict.passes and sabotage is None and against == "one-device":
            verdict = replace(verdict, faults=tuple(_wrong_sums(workers, proof, say)))
        compressed = []
        for layout in proof.compressed if verdict.passes and sabotage is None else ():
            what = what_is_compressed(layout)
            say(f"one step with {what}, for what it leaves out")
            reports_of_step = workers.run(
                COMPRESSED, proof.with_compression(layout), path, reference, on=proof.world
            )
            compressed.append(judge_compressed(what, reports_of_step))
            verdict = replace(verdict, faults=(*verdict.faults, *compressed[-1].faults))
    reached = what_is_reached(proof, ProofDataset.of(proof, dataset), reference.idle_experts)
    seconds = time.monotonic() - started
    return ProofResult(
        proof, shrunk, verdict, reference, reports, diagnosis, seconds, against, reached, tuple(compressed)
    )


def _wrong_sums(workers: Workers, proof: ProofJob, say: Callable[[str], None]) -> Iterator[str]:
    """Sums that the layout takes in 16 bits and one device does not, which no error in float64 shows."""
    say("one step in bfloat16, for the dtype of sums")
    allowed: list[list[ShortSum]] = workers.run(REFER_SUMS, proof.on_one_device("bfloat16"), on=1)
    ranks: dict[ShortSum, list[str]] = defaultdict(list)
    for rank, sums in enumerate(workers.run(COMPARE_SUMS, proof.in_dtype("bfloat16"), on=proof.world)):
        for found in sums:
            ranks[found].append(str(rank))
    for (operator, function), on in ranks.items():
        if (operator, function) not in allowed[0]:
            yield f"summed in bfloat16, not in float32: {operator} in {function} (ranks {', '.join(on)})"


def _check_plain(config: Config, dtype: Dtype) -> None:
    """Before any process starts; only here does this one import torch."""
    if dtype != "float64":
        raise UserError(f"--against plain: computes in float64 only; leave out --dtype {dtype}")
    if config.train.precision == "float8":
        raise UserError(
            "--against plain: plain torch has no products in float8; add train.precision=bfloat16 to prove "
            "the rest"
        )
    if config.model.module is not None:
        raise UserError(
            "--against plain: knows the built-in transformer only, not model.module; leave it out, and the "
            "layout is proven "
            "against your module on one device"
        )
    from shardwise.verify.plain import check_known

    check_known(config)


def _check_module(proof: ProofJob) -> int | None:
    """A user's own module is tried here, before any process starts; only then does this one import torch.
    Returns how many ids it looks up, where its sharding table says by which module."""
    if proof.config.model.module is None:
        return None
    from shardwise.train.check_module import check_module, embedded_ids

    check_module(proof.config, proof.plan.layout)
    return embedded_ids(proof.config)


@dataclass(frozen=True)
class _Search:
    """For the cause, once a proof has failed."""

    workers: Workers
    proof: ProofJob
    sabotage: Sabotage | None
    say: Callable[[str], None]

    def in_layout(self, verdict: Verdict, reference: Reference, reports: list[RankReport]) -> Diagnosis:
        """In float64 whatever the dtype of the proof: a fault of the layout shows there, and rounding does
        not."""
        step = verdict.first_step
        self.say(f"it fails: looking for the first module that differs in step {step}")
        workers, proof = self.workers, self.proof
        path, tensors = workers.folder / "trace.pt", workers.folder / REFERENCE_FILE
        suspects = [error.parameter for error in verdict.failing("gradient") if error.step == step]
        workers.run(REFER_TRACE, proof.on_one_device("float64"), path, step, on=1)
        job = proof.in_dtype("float64")
        traces = workers.run(COMPARE_TRACE, job, path, tensors, step, suspects, self.sabotage, on=proof.world)
        layout = proof.plan.layout
        micro_batches = proof.config.train.global_batch // layout.data_parallel // proof.plan.micro_batch
        sizes = {axis: getattr(layout, axis) for axis in AXES} | {MICRO_BATCHES: micro_batches}
        return diagnose(verdict, reports, traces, sizes, reference.data)

    def in_shared(self, verdict: Verdict, reference: Reference, reports: list[RankReport]) -> Diagnosis:
        """What differs from plain torch is the layout's fault, which one device of ours shows, or one that
        all layouts share."""
        self.say(
            f"it fails: {self.proof.steps} steps on one device, to tell a fault of the layout from one that "
            f"all share"
        )
        path = self.workers.folder / REFERENCE_FILE
        (one_device,) = self.workers.run(REFER, self.proof.on_one_device("float64"), path, on=1)
        again = self.workers.run(COMPARE, self.proof, path, one_device, self.sabotage, on=self.proof.world)
        layout = judge(again, one_device, None, "float64")
        if layout.passes:
            return diagnose_shared(verdict, reports, reference.data)
        return self.in_layout(layout, one_device, again)
