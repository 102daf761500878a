"""One device against a training loop written out by hand with torch alone: whole logits, torch's own AdamW
and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.jobs import ALONE, GPT, LLAMA, Trained, difference, job, on_one_device, train
from torch import Tensor

from shardwise.config import Config, from_tables
from shardwise.data import Dataset
from shardwise.models import Transformer, initialise
from shardwise.train import steps as module_of_steps

STEPS = 6
Plain = tuple[list[float], list[float], dict[str, Tensor]]


def cosine(step: int) -> float:
    """Warm-up over 2 steps to 0.01, then half a cosine down to a tenth of it at step 6."""
    return 0.01 * step / 2 if step <= 2 else 0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 4)) / 2)


def linear(step: int) -> float:
    return 0.01 * step / 2 if step <= 2 else 0.01 * (1 - 0.9 * (step - 2) / 4)


def wsd(step: int) -> float:
    """The last fifth of 6 steps, rounded up, is 2: steps 5 and 6 fall."""
    return 0.01 * step / 2 if step <= 2 else 0.01 * {5: 0.55, 6: 0.1}.get(step, 1.0)


def plain_loop(config: Config, schedule: Callable[[int], float], clip: float | None) -> Plain:
    """No chunked loss, no fused kernel, no micro-batches."""
    torch.set_num_threads(1)
    dataset = Dataset.open(config.data, config.train.seed)
    model = Transformer(config.model).double()
    initialise(model, config.train.seed)
    decayed = [
        p for name, p in model.named_parameters() if p.ndim == 2 and name.split(".")[0] in ("blocks", "head")
    ]
    rest = [p for p in model.parameters() if all(p is not other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        rows = dataset.sequences((step - 1) * config.train.global_batch, config.train.global_batch)
        inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
        documents = None if rows.documents is None else torch.from_numpy(rows.documents)
        logits = model(inputs, documents=documents)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False))
        )
        for parameter in model.parameters():  # clip_grad_norm_ adds 1e-6 to the norm, which is not exact
            parameter.grad *= min(1.0, (clip or math.inf) / norms[-1])
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def largest_difference(ours: Trained, plain: Plain) -> float:
    losses, norms, weights = plain
    numbers = zip((*ours.losses, *ours.norms), (*losses, *norms), strict=True)
    tensors = (difference(ours.weights[name], weight) for name, weight in weights.items())
    return max(*(abs(a - b) / abs(b) for a, b in numbers), *tensors)


@pytest.mark.parametrize(
    ("model", "schedule", "clip", "reset"),
    [
        (LLAMA, cosine, 0.5, False),
        ({**LLAMA, "tied": True}, linear, 0.5, True),
        (GPT, wsd, None, False),
        (LLAMA, wsd, 1e-3, True),
        (GPT, cosine, 1e3, True),
    ],
    ids=[
        "llama-cosine",
        "tied-linear-reset",
        "gpt-wsd-unclipped",
        "llama-wsd-hard-clip-reset",
        "gpt-cosine-idle-clip-reset",
    ],
)
def test_one_device_trains_as_a_plain_torch_loop_does(
    corpus: str, model: dict[str, Any], schedule: Callable[[int], float], clip: float | None, reset: bool
) -> None:
    tables = job(
        corpus,
        model=model,
        data={"reset_attention": reset},
        train={"steps": STEPS, "warmup": 2, "schedule": schedule.__name__, "clip": clip or False},
    )
    assert largest_difference(on_one_device(tables), plain_loop(from_tables(tables), schedule, clip)) < 1e-9


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_update_kernel_divides_the_gradients(
    corpus: str, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Its divisor is in float32. With one in float64, gradients are divided in a pass of their own, which
    took 1.2 % of a step on a GPU."""
    dtypes = []
    monkeypatch.setattr(module_of_steps, "update", lambda *given: dtypes.append(given[2].dtype))
    train(ALONE, job(corpus, train={"precision": precision}))
    assert dtypes == [torch.float32] * 3
