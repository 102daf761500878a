"""Cost of ring attention relative to the fused causal kernel on a whole sequence: time of the kernels, and
memory.

    python benchmarks/ring.py --one-device 4 [--length 32768 --heads 32 --kv-heads 8 --head-dim 128]
                              [--kernel cudnn]
    python benchmarks/ring.py --memory 4 --length 8192 --heads 8 --kv-heads 2 --head-dim 32 [--layers 4]
    python benchmarks/ring.py --check

print one JSON object each. `--one-device C` runs the blocks of all ranks of a ring of C one after another on
one device, without communication, and compares with `scaled_dot_product_attention(is_causal=True)` in our
order of kernels; both do the same FLOPs. Both are first checked against float32. `kernels` is the time in the
blocks' kernels, `all` adds merging and summing in float32.

`--memory C` runs C workers and one worker with the tokens of one of them, and compares the peak memory of
forward and backward: of attention alone, where the ring's buffers are a large part, and in a stack of
transformer layers, where the buffers exist for one layer at a time. On CPUs the storages that are alive are
added up; with a GPU for each worker the peak is that of CUDA's allocator.

`--check` tries every kernel that this device has on small blocks, with and without documents, against
float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import LiveBytes, _free_ports
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from shardwise.comm import Comm
from shardwise.config import Layout
from shardwise.mesh import Worker, join, leave
from shardwise.models.attention import attention_backends
from shardwise.models.torch_dtypes import wide
from shardwise.parallel.blockwise import (
    CPU,
    CUDNN,
    EFFICIENT,
    FLASH,
    KERNELS,
    PLAIN,
    Attended,
    Kernel,
    attend,
    kernel_for,
)
from shardwise.parallel.ring import (
    block_gradients,
    merge_block,
    ring_attention,
    ring_forward,
    zigzag_block,
    zigzag_positions,
)

ON_DEVICE = {"cpu": (CPU, PLAIN), "cuda": (CUDNN, FLASH, EFFICIENT, PLAIN)}


@dataclass(frozen=True)
class Shape:
    """Shape of the attention of a whole sequence."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Rank:
    """The tokens of one rank; keys and values also as they would travel."""

    query: Tensor
    travelling: list[Tensor]
    gradient: Tensor
    documents: Tensor | None


Results = list[Tensor]
"""out, and the gradients of query, key and value, each (batch, heads, length, head_dim)."""


def draw(shape: Shape, device: torch.device) -> list[Tensor]:
    """Query, key, value, gradient of the result: (batch, heads, length, head_dim) views, as projections leave
    them."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, shape.length, count, shape.head_dim) for count in heads]
    return [
        torch.randn(s, generator=generator, device=device, dtype=shape.dtype).transpose(1, 2) for s in sizes
    ]


def split(whole: list[Tensor], context: int, documents: Tensor | None = None) -> list[Rank]:
    ranks = []
    for rank in range(context):
        places = zigzag_positions(whole[0].shape[2], context, rank).to(whole[0].device)
        query, key, value, gradient = (tensor.transpose(1, 2)[:, places] for tensor in whole)
        own = None if documents is None else documents[:, places]
        travelling = [key, value] if own is None else [key, value, own]
        ranks.append(Rank(query.transpose(1, 2), travelling, gradient.transpose(1, 2), own))
    return ranks


def forward(kernel: Kernel, ranks: list[Rank]) -> list[Attended]:
    """Every block of every rank, merged; first its own, then backwards around the ring."""
    results = []
    for number, rank in enumerate(ranks):
        merged = None
        for source in ((number - step) % len(ranks) for step in range(len(ranks))):
            block = zigzag_block(number, source, rank.query.shape[2])
            merged = merge_block(kernel, merged, rank.query, ranks[source].travelling, block, rank.documents)
        assert merged is not None
        results.append((merged[0].to(rank.query.dtype), merged[1]))
    return results


def forward_kernels(kernel: Kernel, ranks: list[Rank]) -> None:
    """The same blocks, with nothing done about their results."""
    for number, rank in enumerate(ranks):
        for source, peer in enumerate(ranks):
            block = zigzag_block(number, source, rank.query.shape[2])
            key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in peer.travelling[:2])
            attend(kernel, rank.query[:, :, block.queries], key, value, block.causal)


def backward(
    kernel: Kernel, ranks: list[Rank], merged: list[Attended], add: bool = True
) -> list[list[Tensor]]:
    """Likewise; for each rank the gradients of query, key and value, which without `add` stay zero."""
    totals = (
        [[torch.zeros_like(t, dtype=wide(t.dtype)) for t in (r.query, *r.travelling[:2])] for r in ranks]
        if add
        else []
    )
    for number, rank in enumerate(ranks):
        for source, peer in enumerate(ranks):
            block = zigzag_block(number, source, rank.query.shape[2])
            arguments = (
                kernel,
                rank.gradient,
                rank.query,
                peer.travelling,
                block,
                merged[number],
                rank.documents,
            )
            found = block_gradients(*arguments)
            if found is not None and add:
                totals[number][0][:, :, block.queries] += found[0]
                for total, part in zip(totals[source][1:], found[1:], strict=True):
                    total.transpose(1, 2)[:, :, block.keys] += part
    return totals


def assembled(context: int, merged: list[Attended], gradients: list[list[Tensor]]) -> Results:
    """Whole tensors from the ranks'."""
    length = context * merged[0][0].shape[2]
    order = (
        torch.cat([zigzag_positions(length, context, rank) for rank in range(context)])
        .argsort()
        .to(merged[0][0].device)
    )
    of_keys = [[total.transpose(1, 2) for total in totals[1:]] for totals in gradients]
    parts = zip([m[0] for m in merged], [t[0] for t in gradients], *zip(*of_keys, strict=True), strict=True)
    return [torch.cat(list(pieces), 2)[:, :, order] for pieces in zip(*parts, strict=True)]


def whole_results(whole: list[Tensor], documents: Tensor | None = None) -> Results:
    """The same by `scaled_dot_product_attention`."""
    leaves = [tensor.detach().requires_grad_() for tensor in whole[:3]]
    mask = None if documents is None else (documents[:, :, None] == documents[:, None, :]).tril().unsqueeze(1)
    repeats = whole[0].shape[1] // whole[1].shape[1]
    key, value = (leaf.repeat_interleave(repeats, 1) for leaf in leaves[1:])
    out = F.scaled_dot_product_attention(leaves[0], key, value, attn_mask=mask, is_causal=mask is None)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]


def errors(found: Results, true: Results) -> dict[str, float]:
    names = ("out", "query", "key", "value")
    return {
        n: float((a.double() - b).norm() / b.double().norm())
        for n, a, b in zip(names, found, true, strict=True)
    }


def seconds(works: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median time of each, in alternation, after a round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            _settle(device)
            started = time.perf_counter()
            work()
            _settle(device)
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(all_) for name, all_ in times.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def one_device(
    shape: Shape, context: int, device: torch.device, name: str | None, rounds: int
) -> dict[str, Any]:
    whole = draw(shape, device)
    leaves = _training(whole[:3])
    kernel = KERNELS[name] if name else kernel_for(leaves[0], leaves[1], leaves[2], masked=False)
    ranks = split(whole, context)
    merged = forward(kernel, ranks)
    true = whole_results([tensor.float() for tensor in whole])
    out = _fused(leaves)
    fused = [out.detach(), *torch.autograd.grad(out, leaves, whole[3], retain_graph=True)]
    error = {
        "ring": errors(assembled(context, merged, backward(kernel, ranks, merged)), true),
        "whole": errors(fused, true),
    }
    assert all(value < 2 * error["whole"][part] + 1e-3 for part, value in error["ring"].items()), error
    del true, fused
    works: dict[str, Callable[[], Any]] = {
        "whole_forward": lambda: _fused(leaves),
        "kernels_forward": lambda: forward_kernels(kernel, ranks),
        "all_forward": lambda: forward(kernel, ranks),
        "whole_backward": lambda: torch.autograd.grad(out, leaves, whole[3], retain_graph=True),
        "kernels_backward": lambda: backward(kernel, ranks, merged, add=False),
        "all_backward": lambda: backward(kernel, ranks, merged),
    }
    spent = seconds(works, device, rounds)
    return {
        "kernel": kernel.name,
        "error_to_float32": error,
        **_counts(shape, context),
        **_ratios(spent, shape),
    }


def _training(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _fused(leaves: list[Tensor]) -> Tensor:
    with attention_backends(leaves[0].device.type):
        query, key, value = leaves
        grouped = key.shape[1] < query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _ratios(spent: dict[str, float], shape: Shape) -> dict[str, Any]:
    both = {
        kind: spent[f"{kind}_forward"] + spent[f"{kind}_backward"] for kind in ("whole", "kernels", "all")
    }
    ratio = {kind: both[kind] / both["whole"] for kind in ("kernels", "all")}
    for way in ("forward", "backward"):
        ratio |= {
            f"{kind}_{way}": spent[f"{kind}_{way}"] / spent[f"whole_{way}"] for kind in ("kernels", "all")
        }
    flops = 3.5 * _forward_flops(shape, shape.length * (shape.length + 1) // 2)
    rates = {f"{kind}_tflops": flops / total / 1e12 for kind, total in both.items()}
    return {
        "milliseconds": {name: 1e3 * value for name, value in spent.items()},
        "ratio_to_whole": ratio,
        **rates,
    }


def _counts(shape: Shape, context: int) -> dict[str, Any]:
    """FLOPs of the ring's blocks and of the whole (forward; backward has 2.5 times as many), and bytes sent
    by one rank."""
    tokens = shape.length // context
    pairs = 0
    for rank in range(context):
        for source in range(context):
            block = zigzag_block(rank, source, tokens)
            rows, columns = (part.stop - part.start for part in (block.queries, block.keys))
            pairs += rows * (rows + 1) // 2 if block.causal else rows * columns
    of_keys = 2 * shape.batch * tokens * shape.kv_heads * shape.head_dim
    return {
        "forward_flops": {
            "ring": _forward_flops(shape, pairs),
            "whole": _forward_flops(shape, shape.length * (shape.length + 1) // 2),
        },
        "bytes_sent_by_a_rank": {
            "forward": (context - 1) * of_keys * shape.dtype.itemsize,
            "backward": (context - 1) * of_keys * (shape.dtype.itemsize + wide(shape.dtype).itemsize),
        },
    }


def _forward_flops(shape: Shape, pairs: int) -> int:
    return 4 * shape.batch * shape.heads * shape.head_dim * pairs


def check(device: torch.device) -> list[dict[str, Any]]:
    """A row for each kernel and kind of block; a kernel that fails says so and the others go on."""
    rows = []
    for kernel in ON_DEVICE[device.type]:
        dtypes = [torch.bfloat16] if kernel in (CUDNN, FLASH) else [torch.bfloat16, torch.float32]
        for dtype in dtypes:
            for with_documents in (False, True) if kernel not in (CUDNN, FLASH) else (False,):
                for context, batch in ((2, 2), (3, 1), (4, 2)):
                    row = {
                        "kernel": kernel.name,
                        "dtype": str(dtype),
                        "documents": with_documents,
                        "context": context,
                    }
                    shape = Shape(240 * context, 8, 2, 64, batch, dtype)
                    rows.append({**row, **_check(kernel, shape, context, device, with_documents)})
    return rows


def _check(
    kernel: Kernel, shape: Shape, context: int, device: torch.device, with_documents: bool
) -> dict[str, Any]:
    whole = draw(shape, device)
    places = torch.arange(shape.length, device=device)
    documents = (places // 75 + places // 200).expand(shape.batch, -1).int() if with_documents else None
    ranks = split(whole, context, documents)
    true = whole_results([tensor.double() for tensor in whole], documents)
    try:
        merged = forward(kernel, ranks)
        found = errors(assembled(context, merged, backward(kernel, ranks, merged)), true)
    except (RuntimeError, AssertionError) as failure:
        return {"failed": str(failure).splitlines()[0][:300]}
    limit = 1e-2 if shape.dtype == torch.bfloat16 else 1e-5
    return {"worst": max(found.values()), "right": max(found.values()) < limit}


class LiveWithin(LiveBytes):
    """Looks into our operator too, which hides what it does from others."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.shardwise.ring_attention.default:
            with self:
                return ring_forward(*args)
        return super().__torch_dispatch__(function, types, args, kwargs)


class Layer(nn.Module):
    """A transformer layer of Llama's kind, in its parts that hold activations."""

    def __init__(self, shape: Shape, comm: Comm) -> None:
        super().__init__()
        self.shape, self.comm = shape, comm
        hidden, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        ffn = 7 * hidden // 2
        sizes = {
            "query": (hidden, hidden),
            "key": (hidden, keys),
            "value": (hidden, keys),
            "output": (hidden, hidden),
        }
        sizes |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        self.weights = nn.ModuleDict(
            {n: nn.Linear(*s, bias=False, dtype=shape.dtype) for n, s in sizes.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(x, x.shape[-1:])
        query, key, value = (self.heads(self.weights[name](normal)) for name in ("query", "key", "value"))
        mixed = ring_attention(query, key, value, self.comm)
        x = x + self.weights["output"](mixed.transpose(1, 2).flatten(2))
        normal = F.rms_norm(x, x.shape[-1:])
        grown: Tensor = self.weights["down"](
            F.silu(self.weights["gate"](normal)) * self.weights["up"](normal)
        )
        return x + grown

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)


def fullest(worker: Worker, shape: Shape, layers: int) -> dict[str, int]:
    """The most bytes on this worker at once, for its share of a sequence: of attention alone and of a stack
    of layers."""
    sizes: dict[str, Any] = {"data": 1, "context": worker.world}
    comm = Comm(join(worker, Layout(**sizes)))
    tokens = shape.length // worker.world
    hidden = shape.heads * shape.head_dim
    here = Shape(tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.batch, shape.dtype)

    def alone() -> None:
        *leaves, gradient = draw(here, comm.device)
        query, key, value = _training(leaves)
        torch.autograd.grad(ring_attention(query, key, value, comm), (query, key, value), gradient)

    stack = nn.Sequential(*(Layer(here, comm) for _ in range(layers))).to(comm.device)

    def stacked() -> None:
        x = torch.randn(here.batch, tokens, hidden, device=comm.device, dtype=here.dtype)
        stack(x).backward(torch.ones_like(x))

    return {"attention": _most(alone, comm.device), f"{layers}_layers": _most(stacked, comm.device)}


def _most(work: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        work()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return int(torch.cuda.max_memory_allocated() - before)
    with LiveWithin() as live:
        live.watching = True
        work()
    return int(live.fullest)


def _work(rank: int, workers: int, port: int, shape: Shape, layers: int, folder: Path) -> None:
    found = fullest(Worker(rank, workers, rank, workers, "127.0.0.1", port, "benchmark"), shape, layers)
    (folder / f"{workers}-{rank}.json").write_text(json.dumps(found))
    leave()


def memory(shape: Shape, context: int, layers: int) -> dict[str, Any]:
    shorter = Shape(
        shape.length // context, shape.heads, shape.kv_heads, shape.head_dim, shape.batch, shape.dtype
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for workers, sequence in ((context, shape), (1, shorter)):
            spawn(_work, (workers, _free_ports(1)[0], sequence, layers, folder), workers)
        ranks = [json.loads((folder / f"{context}-{rank}.json").read_text()) for rank in range(context)]
        one = json.loads((folder / "1-0.json").read_text())
    most = {name: max(rank[name] for rank in ranks) for name in one}
    ratio = {name: most[name] / one[name] for name in one}
    return {"context": context, "bytes_on_the_fullest_rank": most, "bytes_on_one_device": one, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--one-device", type=int, metavar="C")
    what.add_argument("--memory", type=int, metavar="C")
    what.add_argument("--check", action="store_true")
    for name, default in (
        ("length", 32768),
        ("heads", 32),
        ("kv-heads", 8),
        ("head-dim", 128),
        ("rounds", 20),
        ("layers", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernel")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(options.length, options.heads, options.kv_heads, options.head_dim)
    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
    }
    if options.check:
        result: dict[str, Any] = {"blocks": check(device)}
    elif options.memory:
        result = {**vars(options), **memory(shape, options.memory, options.layers)}
    else:
        result = {
            **vars(options),
            **one_device(shape, options.one_device, device, options.kernel, options.rounds),
        }
    print(json.dumps({**facts, **result}, indent=1))


if __name__ == "__main__":
    main()
