"""`train.deterministic`: what it sets, and that it does what it says where there is a GPU to say it of."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor
from ranks.jobs import ALONE, FAMILIES, job, start, train

from shardwise._torch import compute_deterministically
from shardwise.train.describe import describe_run


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of this process as they were."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with inductor.patch(deterministic=False):
        yield
    torch.use_deterministic_algorithms(False)


def test_on_cpus_it_changes_nothing_and_is_named_as_such(corpus: str) -> None:
    training = start(ALONE, job(corpus, train={"deterministic": True}))
    if training.mesh.device.type == "cpu":
        assert not torch.are_deterministic_algorithms_enabled()
        assert "train.deterministic: CPUs add in one order anyway" in describe_run(training)["no effect"]


def test_kernels_libraries_and_compiler_are_told(restored: None) -> None:
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert inductor.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gpt", "experts"])
def test_a_run_on_a_gpu_repeats_to_the_last_bit(restored: None, corpus: str, family: str) -> None:
    settings = {"deterministic": True, "precision": "bfloat16", "micro_batch": 4}
    first, second = (train(ALONE, job(corpus, model=FAMILIES[family], train=settings)) for _ in range(2))
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
