"""The proof from end to end: the reference, the layout, the verdict, and on failure where and why.

    reference (our code in one process, or plain torch) → file → every rank compares → verdict
    if the verdict is a failure: once more, module by module → diagnosis

A proof of K steps costs K steps on one device and K on the layout, all on the cores of this machine (or the
layout's on its GPUs, if they are requested). It takes memory for one copy of the model per process, and for a
while, disk space for K + 1 copies of the model in float64.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.config import AXES, Config, brings_data
from shardwise.data import Dataset, check_vocabulary, with_data_settings
from shardwise.errors import UserError
from shardwise.files import Json
from shardwise.plurals import counted
from shardwise.proof.diagnose import MICRO_BATCHES, Diagnosis, diagnose, diagnose_shared
from shardwise.proof.proof_job import Against, Dtype, ProofJob, Sabotage, check_sabotage, prepare_proof
from shardwise.proof.proof_rows import ProofDataset, Reached, SamplesReached, what_is_reached
from shardwise.proof.proof_workers import Workers
from shardwise.proof.rank_reports import HELD_OUT, RankReport, Reference, ShortSum
from shardwise.proof.shrink import Changes
from shardwise.proof.verdict import CompressedVerdict, Verdict, judge, judge_compressed, what_is_compressed

REFER, COMPARE = (
    "shardwise.proof.compare_layout:write_reference",
    "shardwise.proof.compare_layout:compare_with_reference",
)
REFER_PLAIN = "shardwise.proof.compare_layout:write_plain_reference"
REFER_TRACE, COMPARE_TRACE = (
    "shardwise.proof.trace_modules:write_reference_trace",
    "shardwise.proof.trace_modules:compare_traces",
)
COMPRESSED = "shardwise.proof.compressed_step:measure_compressed"
REFER_SUMS = COMPARE_SUMS = "shardwise.proof.sum_dtypes:short_sums"
"""Tasks of the workers, as "module:function": REFER… writes a reference, COMPARE… compares with it."""
REFERENCE_FILE = "reference.pt"
PLAIN_FILE = "plain.pt"


@dataclass(frozen=True)
class ProofResult:
    """The result of a proof."""

    proof: ProofJob
    shrunk: Changes | None
    verdict: Verdict
    reference: Reference
    reports: list[RankReport]
    diagnosis: Diagnosis | None
    seconds: float
    against: Against
    reached: Reached | SamplesReached
    compressed: tuple[CompressedVerdict, ...] = ()

    @property
    def sabotaged(self) -> Json | None:
        """Description of the fault that was injected on purpose; None if there was none."""
        return next((report.sabotaged for report in self.reports if report.sabotaged), None)

    @property
    def unnoticed(self) -> bool:
        """Whether a fault was injected on purpose and the proof still passes."""
        return self.sabotaged is not None and self.verdict.passes

    def to_json(self) -> Json:
        """Return the result as `--json` prints it."""
        proof, verdict = self.proof, self.verdict
        rows = [error.to_json(proof.dtype) for error in verdict.errors]
        parameters = [row for row in rows if row["parameter"]]
        numbers = _errors_of_numbers(rows)
        parallel = self._parallel_losses()
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
            "worst": rows[0],
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
        """Return the loss of each step, from the rank whose loss is furthest from the reference."""
        by_step = zip(*(report.losses for report in self.reports), strict=True)
        return [
            max(losses, key=lambda loss: abs(loss - reference))
            for losses, reference in zip(by_step, self.reference.losses, strict=True)
        ]


def _errors_of_numbers(rows: Sequence[Json]) -> dict[object, Json]:
    """Return, by quantity, the errors of quantities that belong to no parameter."""
    shown = ("relative_error", "rounding_units", "step", "ranks")
    return {row["quantity"]: {key: row[key] for key in shown} for row in rows if not row["parameter"]}


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
    """Run a job on its layout and on one device (or in plain torch), and compare.

    `preparing()` returns a context whose value is called with the progress of tokenising. `say` is called
    with a sentence at each stage. `workers` are used if given; there must be at least as many as the layout
    needs.
    """
    started = time.monotonic()
    if against == "plain":
        _check_plain(config, dtype)
    proof, shrunk = prepare_proof(config, steps, dtype)
    if sabotage is not None:
        check_sabotage(sabotage, proof)
    dataset = None
    if not brings_data(config):
        with preparing() as progress:
            dataset = Dataset.open(proof.config.data, proof.config.train.seed, progress)
        proof = _with_ids_of_module(proof, dataset)
    else:
        _check_module(proof)
    with Workers(proof.world) if workers is None else nullcontext(workers) as workers:
        path = workers.folder / (PLAIN_FILE if against == "plain" else REFERENCE_FILE)
        reference, cost = _references(workers, proof, path, against, say)
        say(f"{counted(steps, 'step')} on {counted(proof.world, 'process')}")
        reports = workers.run(COMPARE, proof, path, reference, sabotage, on=proof.world)
        verdict = judge(reports, reference, cost, dtype)
        diagnosis, compressed = None, tuple[CompressedVerdict, ...]()
        if not verdict.passes:
            search = _Search(workers, proof, sabotage, say)
            localise = search.in_shared if against == "plain" else search.in_layout
            diagnosis = localise(verdict, reference, reports)
        elif sabotage is None:
            faults = _wrong_sums(workers, proof, say) if against == "one-device" else ()
            verdict = replace(verdict, faults=tuple(faults))
            if verdict.passes:
                compressed = tuple(_compressed_steps(workers, proof, path, reference, say))
                verdict = replace(verdict, faults=_faults(compressed))
    reached: Reached | SamplesReached = SamplesReached(steps * proof.config.train.global_batch)
    if dataset is not None:
        reached = what_is_reached(proof, ProofDataset.of(proof, dataset), reference.idle_experts)
    seconds = time.monotonic() - started
    return ProofResult(
        proof, shrunk, verdict, reference, reports, diagnosis, seconds, against, reached, compressed
    )


def _references(
    workers: Workers, proof: ProofJob, path: Path, against: Against, say: Callable[[str], None]
) -> tuple[Reference, RankReport | None]:
    """Write the reference to a file. Return its numbers, and the errors of one device in the dtype of the
    proof (None in float64)."""
    steps, plain = counted(proof.steps, "step"), against == "plain"
    say(f"{steps} {'in plain torch' if plain else 'on one device'}")
    refer = REFER_PLAIN if plain else REFER
    (reference,) = workers.run(refer, proof.on_one_device("float64"), path, on=1)
    if proof.dtype == "float64":
        return reference, None
    say(f"{steps} on one device in {proof.dtype}, for the cost of rounding")
    (cost,) = workers.run(COMPARE, proof.on_one_device(proof.dtype), path, reference, on=1)
    return reference, cost


def _faults(compressed: Sequence[CompressedVerdict]) -> tuple[str, ...]:
    """Return the faults of all steps with compression."""
    return tuple(fault for step in compressed for fault in step.faults)


def _compressed_steps(
    workers: Workers, proof: ProofJob, path: Path, reference: Reference, say: Callable[[str], None]
) -> Iterator[CompressedVerdict]:
    """Yield the verdict on one step with each compression that the job asks for."""
    for layout in proof.compressed:
        what = what_is_compressed(layout)
        say(f"one step with {what}, for what it leaves out")
        job = proof.with_compression(layout)
        yield judge_compressed(what, workers.run(COMPRESSED, job, path, reference, on=proof.world))


def _wrong_sums(workers: Workers, proof: ProofJob, say: Callable[[str], None]) -> Iterator[str]:
    """Yield the sums that the layout takes in 16 bits and one device does not. No error in float64 shows
    these."""
    say("one step in bfloat16, for the dtype of sums")
    allowed: list[list[ShortSum]] = workers.run(REFER_SUMS, proof.on_one_device("bfloat16"), on=1)
    ranks: dict[ShortSum, list[str]] = defaultdict(list)
    for rank, sums in enumerate(workers.run(COMPARE_SUMS, proof.in_dtype("bfloat16"), on=proof.world)):
        for short_sum in sums:
            ranks[short_sum].append(str(rank))
    for (operator, function), on in ranks.items():
        if (operator, function) not in allowed[0]:
            yield f"summed in bfloat16, not in float32: {operator} in {function} (ranks {', '.join(on)})"


def _check_plain(config: Config, dtype: Dtype) -> None:
    """Refuse a job that plain torch cannot run, before any process starts.

    Only here does this process import torch.
    """
    if dtype != "float64":
        raise UserError(f"--against plain: computes in float64 only; leave out --dtype {dtype}")
    if config.train.precision == "float8":
        raise UserError(
            "--against plain: plain torch has no products in float8; "
            "add train.precision=bfloat16 to prove the rest"
        )
    if config.model.module is not None or config.run.program is not None:
        raise UserError(
            "--against plain: knows the built-in transformer only, not model.module and no program; leave "
            "it out, and "
            "the layout is proven against your module on one device"
        )
    from shardwise.proof.plain_torch import check_known

    check_known(config)


def _check_module(proof: ProofJob) -> int | None:
    """Check a user's own module before any process starts, and return the number of token ids that it looks
    up.

    The number is None where the sharding table does not name the embedding. Only here does this process
    import torch.
    """
    if proof.config.model.module is None:
        return None
    from shardwise.train.check_module import check_module, embedded_ids

    check_module(proof.config, proof.plan.layout)
    return None if proof.config.model.is_of_program else embedded_ids(proof.config)


def _with_ids_of_module(proof: ProofJob, dataset: Dataset) -> ProofJob:
    """Check module and vocabulary, and return the proof with the ids that a user's own module takes."""
    embedded = _check_module(replace(proof, config=with_data_settings(proof.config, dataset)))
    check_vocabulary(dataset, proof.config.model.vocabulary)
    if proof.config.model.module is None:
        return proof
    return replace(proof, ids=min(embedded or dataset.vocabulary, proof.ids))


@dataclass(frozen=True)
class _Search:
    """Searches for the cause after a proof has failed."""

    workers: Workers
    proof: ProofJob
    sabotage: Sabotage | None
    say: Callable[[str], None]

    def in_layout(self, verdict: Verdict, reference: Reference, reports: list[RankReport]) -> Diagnosis:
        """Search for the fault in the layout.

        The search runs in float64 whatever the dtype of the proof: a fault of the layout shows there, and
        rounding does not.
        """
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
        """Search for the cause of a difference from plain torch.

        Our own code on one device tells whether the fault is in the layout or in what all layouts share.
        """
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
