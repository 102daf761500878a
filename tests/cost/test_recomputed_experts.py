"""What recomputation by operators keeps and repeats of blocks with experts, against what torch keeps and
repeats of real ones.

On a CPU, where nothing is fused: an expert's activation is kept beside its product.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cost.test_prices_of_computing import IDEAL
from ranks.jobs import Tables, job, start
from ranks.pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardwise.config import Model
from shardwise.cost.footprint import activation_bytes
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import BUT_ATTENTION, FULL, SELECTIVE, Workload, space_of
from shardwise.mesh import Worker
from shardwise.models.transformer import Transformer
from shardwise.parallel.recompute import recompute

TOKENS = 128
NARROW_AND_WIDE = torch.bfloat16, torch.float32
SHAPE: dict[str, Any] = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocabulary": 64,
    "ffn": 128,
    "expert_ffn": 32,
}


class Alive(TorchDispatchMode):
    """Bytes of what operators made and somebody still holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.of_model = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self.bytes: dict[int, int] = {}

    def held(self) -> int:
        """Bytes that are held for good: the least of several looks. Threads of gloo let go of what they sent
        a moment later."""
        looks = []
        for _ in range(20):
            time.sleep(0.01)
            looks.append(sum(self.bytes.values()))
        return min(looks)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in {*self.bytes, *self.of_model}:
                self.bytes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.bytes.pop, storage._cdata, None)
        return result


def experts(shared: int, layers: int = 1) -> Model:
    return Model(**SHAPE, layers=layers, experts=4, experts_per_token=2, shared_experts=shared)


def after_forward(shared: int, layers: int, mode: str, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes that wait for backward, and the FLOPs of backward."""
    model = Transformer(experts(shared, layers))
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    recompute(model, list(model.blocks), mode, compiled=False)
    x, alive = torch.randn(1, TOKENS, SHAPE["hidden"], dtype=dtype, requires_grad=True), Alive(model)
    with alive:
        y = x
        for block in model.blocks:
            y = block(y, None, None)
        found = alive.held()
    with FlopCounterMode(display=False) as flops:
        y.sum().backward()
    return found, flops.get_total_flops()


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize(("mode", "place"), [("all-but-attention", BUT_ATTENTION), ("selective", SELECTIVE)])
def test_parts_of_a_block_keep_their_inputs_and_what_the_mode_says(
    shared: int, mode: str, place: int
) -> None:
    (more, _), (less, _) = (after_forward(shared, layers, mode) for layers in (3, 2))
    work = Workload(experts(shared), TOKENS, 1, precision="float32")
    predicted = float(activation_bytes(work, space_of([{"recompute": place}]), SHARDWISE)[0][0])
    activations = 4 * TOKENS * 2 * SHAPE["expert_ffn"]
    assert predicted + activations <= more - less <= 1.05 * (predicted + activations), (
        "beside them what routers keep"
    )


@pytest.mark.parametrize("shared", [0, 3])
def test_sums_over_tensor_devices_are_kept_before_they_are_taken(
    ranks: Callable[[int], Pool], corpus: str, shared: int
) -> None:
    """A product that is split by inputs gives a part of a sum, as long as the whole sequence. That is what
    `selective` keeps."""
    tables = [
        job(
            corpus,
            model={**experts(shared, layers).model_dump(exclude_unset=True), "positions": "learned"},
            layout={"data": 1, "tensor": 2},
            train={"recompute": "selective", "micro_batch": 1},
        )
        for layers in (2, 3)
    ]
    held = [
        [ranks(2).run(kept_by_blocks, one, tokens)[0] for one in tables] for tokens in (TOKENS // 2, TOKENS)
    ]
    half, whole = (more - less for less, more in held)
    found = whole - half  # what does not depend on tokens, as weights, is gone
    space = space_of([{"recompute": SELECTIVE, "tensor": 2}])
    predicted = (
        float(
            activation_bytes(Workload(experts(shared), TOKENS, 1, precision="float64"), space, SHARDWISE)[0][
                0
            ]
        )
        / 2
    )
    activations = 8 * TOKENS // 2 * SHAPE["expert_ffn"]
    assert predicted + activations <= found <= 1.05 * (predicted + activations), (
        "beside them what routers keep"
    )


def kept_by_blocks(worker: Worker, tables: Tables, tokens: int) -> int:
    """Bytes that wait for backward after the forward of all blocks on this rank."""
    model = start(worker, tables).parallel.model
    x = torch.randn(1, tokens // worker.world, SHAPE["hidden"], dtype=torch.float64, requires_grad=True)
    alive = Alive(model)
    with alive:
        y = x
        for block in model.blocks:
            y = block(y, None, None)
        found = alive.held()
    y.sum().backward()
    return found


@pytest.mark.parametrize("shared", [0, 3])
def test_products_of_attention_and_shared_experts_are_made_again_but_for_the_last(shared: int) -> None:
    (_, again), (_, once) = (after_forward(shared, 1, mode) for mode in ("all-but-attention", "none"))
    space = space_of([{"micro_batch": 1, "recompute": BUT_ATTENTION}])
    seconds = predict(Workload(experts(shared), TOKENS, 1), space, IDEAL).seconds["recompute"]
    assert float(seconds[0]) * IDEAL.device.peak["bfloat16"] == pytest.approx(again - once)


def test_copies_of_routed_experts_wait_for_backward() -> None:
    """In the computing dtype, where weights are not gathered: only full recomputation makes them again."""
    weights = 2 * 3 * 4 * SHAPE["expert_ffn"] * SHAPE["hidden"]
    for mode, place in (("all-but-attention", BUT_ATTENTION), ("full", FULL)):
        per_block = [
            after_forward(0, 3, mode, dtype)[0] - after_forward(0, 2, mode, dtype)[0]
            for dtype in NARROW_AND_WIDE
        ]
        copies = per_block[0] - per_block[1] / 2  # activations are half as large
        gathered = [
            float(
                predict(
                    Workload(experts(0, layers), TOKENS, 1), space_of([{"recompute": place}]), IDEAL
                ).memory["gathered"][0]
            )
            for layers in (3, 2)
        ]
        assert (copies >= weights) == (gathered[0] - gathered[1] >= weights) == (mode == "all-but-attention")
