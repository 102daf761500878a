"""Proofs of a user's own module, and proofs that someone ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwise.cli import verify as command
from shardwise.config import Config, read
from shardwise.errors import UserError
from shardwise.proof import prove as proving
from shardwise.proof.diagnose import diagnose
from shardwise.proof.proof_job import prepare_proof
from shardwise.proof.proof_rows import Reached
from shardwise.proof.prove import prove
from shardwise.proof.rank_reports import ModuleDifference, RankReport, RankTrace, Reference, SliceComparison
from shardwise.proof.verdict import QuantityError, Verdict, judge

ROOT = Path(__file__).parents[2]
OWN = (ROOT / "examples" / "own_model.py").read_text()
SMALL = [
    "train.global_batch=4",
    "model.hidden=32",
    "model.head_dim=8",
    "model.ffn=32",
    "data.sequence_length=16",
]


def job(module: Path, *overrides: str) -> Config:
    source = f"data.source={ROOT / 'examples' / 'shakespeare.txt'}"
    return read(
        ROOT / "examples" / "own_model.toml", [f"model.module={module}:OwnModel", source, *SMALL, *overrides]
    )


def written(folder: Path, old: str, new: str) -> Path:
    """The example with one thing changed."""
    assert OWN.count(old) == 1
    path = folder / "own.py"
    path.write_text(OWN.replace(old, new))
    return path


def test_a_dropped_sum_of_a_module_without_blocks_is_found(tmp_path: Path) -> None:
    module = written(tmp_path, "self.sharding = Sharding(", "self.table = Sharding(")
    result = prove(job(module, "layout.data=2", "layout.zero=3"), steps=1, sabotage="drop-all-reduce")
    assert result.sabotaged is not None
    assert result.diagnosis is not None
    (cause,) = result.diagnosis.causes
    assert cause.what == "missing reduction over data"
    assert set(cause.parameters) <= set(result.sabotaged["parameters"])
    assert "embedding.weight" in result.sabotaged["parameters"]


def test_a_module_that_drops_is_proven_without_dropping(tmp_path: Path) -> None:
    lookup = "self.embedding(inputs)"
    module = written(tmp_path, lookup, f"nn.functional.dropout({lookup}, 0.3, self.training)")
    result = prove(job(module, "layout.data=2", "train.micro_batch=1"), steps=1)
    assert result.verdict.passes, result.verdict.errors[0]


def test_a_parameter_that_forward_does_not_use_is_named(tmp_path: Path) -> None:
    head = "self.norm = nn.LayerNorm(config.hidden)"
    module = written(tmp_path, head, f"{head}\n        self.spare = nn.Linear(2, 2)")
    with pytest.raises(UserError, match=r"spare\.weight has no gradient.*Use it in forward"):
        prove(job(module, "layout.data=2"), steps=1)


@pytest.mark.full
def test_a_module_that_counts_its_own_items_is_proven(tmp_path: Path) -> None:
    """One class for each sequence, and fewer of them where a sequence ends without a target."""
    loss = (
        'return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")'
    )
    module = written(
        tmp_path, loss, 'return F.cross_entropy(logits.mean(1), targets[:, -1], reduction="sum")'
    )
    counting = (
        "\n    def count_items(self, inputs, targets):\n        return (targets[:, -1] != -100).sum()\n"
    )
    module.write_text(module.read_text() + counting)
    result = prove(
        job(module, "layout.data=2", "layout.tensor=2", "layout.zero=3", "train.micro_batch=1"), steps=2
    )
    assert result.verdict.passes, result.verdict.errors[0]
    assert result.reference.losses[0] > 3, "of one class among 259"


def test_frozen_weights_that_forward_changes_are_named(tmp_path: Path) -> None:
    old = "self.norm = nn.LayerNorm(config.hidden)"
    module = written(tmp_path, old, f"{old}\n        self.norm.requires_grad_(False)")
    module.write_text(
        module.read_text().replace(
            "        x = inputs\n", "        x = inputs\n        self.norm.weight.mul_(0.5)\n"
        )
    )
    with pytest.raises(UserError, match=r"norm\.weight has requires_grad=False, and forward changes it"):
        prove(job(module, "layout.data=1"), steps=1)


def test_a_frozen_weight_with_other_bits_than_one_device_fails_the_proof() -> None:
    slices = [
        SliceComparison(("", "loss", 1), (), 0.0, 1.0, 1.0, 1.0),
        SliceComparison(("body", "weight", 1), ((0, 1),), 0.0, 1, 1, 1),
    ]
    squares = {("", "loss", 1): 1.0, ("body", "weight", 1): 1.0, ("head", "gradient", 1): 1.0}
    truth = Reference([1.0], [1.0], {"body": (1,)}, {}, squares, 0.1)
    reports = [RankReport(rank, {}, slices, [1.0], [], {}, frozen={"body": rank == 0}) for rank in range(2)]
    assert judge(reports[:1], truth, None, "float64").passes
    verdict = judge(reports, truth, None, "float64")
    assert verdict.faults == ("body is frozen, and its bits are not those of one device on ranks 1",)
    assert not verdict.passes


def test_a_module_that_cannot_be_split_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(count: int) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(proving, "Workers", started)
    module = written(tmp_path, "self.sharding = Sharding(", "self.table = Sharding(")
    with pytest.raises(UserError, match="sharding"):
        prove(job(module, "layout.tensor=2"), steps=1)


def test_one_percent_is_not_looked_for_in_bfloat16() -> None:
    with pytest.raises(UserError, match=r"rounding to bfloat16.*float64"):
        prove(
            job(ROOT / "examples" / "own_model.py", "layout.data=1"),
            dtype="bfloat16",
            sabotage="scale-gradient",
        )


def test_a_sabotage_that_passes_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = [
        SliceComparison(("", quantity, 1), (), 0.0, 1.0, 1.0, 1.0) for quantity in ("loss", "gradient norm")
    ]
    report = RankReport(0, {}, number, [1.0], [], {}, {"kind": "scale-gradient", "rank": 0})
    truth = Reference([1.0], [1.0], {}, {}, {("", "loss", 1): 1.0, ("", "gradient norm", 1): 1.0}, 0.1)
    proof, _ = prepare_proof(job(ROOT / "examples" / "own_model.py", "layout.data=1"), 1, "float64")
    reached = Reached((1, 1), (1, 1), None, 0, None, {}, 0)
    verdict = judge([report], truth, None, "float64")
    result = proving.ProofResult(proof, None, verdict, truth, [report], None, 0.0, "one-device", reached)
    assert result.verdict.passes
    assert result.to_json()["sabotage_found"] is False
    monkeypatch.setattr(command, "prove_job", lambda *arguments: result)
    with pytest.raises(typer.Exit) as left:
        command.verify(Path("job.toml"))
    assert left.value.exit_code == 1
    assert "the sabotage was not found" in capsys.readouterr().err


def test_a_terminated_proof_leaves_nothing_behind(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "shardwise",
        "verify",
        "examples/verify.toml",
        "layout.data=2",
        "--steps",
        "500",
    ]
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    assert any("one device" in said for said in started.stderr)
    assert list(tmp_path.glob("shardwise-verify-*"))
    started.terminate()
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("shardwise-verify-*"))


def test_axes_of_one_size_are_all_named() -> None:
    # Three times the reference, in squares and products: 9 and 3.
    traces = [
        RankTrace(rank, None, ModuleDifference("norm", 4, 2.0, 0, 1.0, 9.0, 3.0), {}) for rank in range(2)
    ]
    (cause,) = diagnose(Verdict((), ()), [], traces, {"tensor": 3, "data": 3, "context": 2}).causes
    assert (cause.axis, cause.ratio, cause.ranks) == ("tensor or data", 3.0, (0, 1))
    (cause,) = diagnose(Verdict((), ()), [], traces, {"tensor": 2}).causes
    assert (cause.what, cause.axis) == ("scaled by 3", None)


def test_of_two_copies_of_a_tied_weight_on_one_rank_the_wrong_one_is_explained() -> None:
    key = ("embedding.weight", "gradient", 1)
    right, doubled = (
        SliceComparison(key, (), 0.0, 1.0, 1.0, 1.0),
        SliceComparison(key, (), 1.0, 1.0, 4.0, 2.0),
    )
    error = QuantityError(*key[:2], relative_error=1.0, limit=1e-9, step=1, ranks=(0,))
    for slices in ([right, doubled], [doubled, right]):
        report = RankReport(0, {"data": 0}, slices, [1.0], [], {"embedding.weight": {"data": 2}}, None)
        (cause,) = diagnose(Verdict((error,), ()), [report], [RankTrace(0, None, None, {})]).causes
        assert (cause.what, cause.ratio) == ("reduced twice, or not divided, over data", 2.0)
