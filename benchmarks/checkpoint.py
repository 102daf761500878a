"""Cost of a checkpoint: how long training stops for a save in the background, and for one in the foreground.

    python benchmarks/checkpoint.py [--gigabytes 1.2] [--workers 1] [--repeats 3] [--folder DIR]

prints one JSON object. Baselines, measured in the same run: for the save in the background, a copy of the
same number of bytes within host memory (`copy_` of one tensor to another, both touched before); for the save
in the foreground, `dd if=/dev/zero … conv=fsync` of the same number of bytes to the same disk. The state is
like that of a model with AdamW: matrices of 16 MB in sets of three, and small vectors between them. With
several workers each holds its share, as in ZeRO; all copy and write at the same time, and so do the
baselines.

The first save allocates the buffers and is not counted. Each repeat measures all four in turn; the medians of
the times and of the ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.checkpoint import Manifest
from shardwise.checkpoint.save import Checkpointer, Retention, Saved, State
from shardwise.checkpoint.state_key import StateKey
from shardwise.config import Layout
from shardwise.mesh import Mesh, Worker, join, leave
from shardwise.optimizers import from_table

ROWS, COLUMNS = 2048, 2048  # 16 MB of float32


def state(mesh: Mesh, gigabytes: float) -> State:
    """This worker's share of about that many bytes."""
    found: State = {}
    for number in range(max(1, round(gigabytes * 1e9 / (3 * ROWS * COLUMNS * 4)))):
        moments = (StateKey.optimizer(f"{number}.weight", slot) for slot in from_table({}).slots)
        for key in (StateKey.model(f"{number}.weight"), *moments):
            found[key] = torch.randn(ROWS // mesh.worker.world, COLUMNS)
        found[StateKey.model(f"{number}.norm")] = torch.randn(COLUMNS // mesh.worker.world)
    if mesh.grid is None:
        return found
    return {
        key: DTensor.from_local(value, mesh.sub("data"), [Shard(0)], run_check=False)
        for key, value in found.items()
    }


def together(mesh: Mesh) -> None:
    if mesh.worker.world > 1:
        dist.barrier()


def copy_seconds(mesh: Mesh, source: Tensor, target: Tensor) -> float:
    together(mesh)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def dd_seconds(mesh: Mesh, folder: Path, size: int) -> float:
    """The same number of bytes by dd, each worker its own file."""
    path = folder / f"dd-{mesh.worker.rank}"
    together(mesh)
    began = time.perf_counter()
    blocks = [f"bs={1 << 20}", f"count={size // (1 << 20)}"]
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", *blocks, "conv=fsync"], check=True, capture_output=True
    )
    together(mesh)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def save_seconds(checkpointer: Checkpointer, folder: Path, tensors: State, step: int, wait: bool) -> Saved:
    together(checkpointer.mesh)
    manifest = Manifest(step, {}, {}, {}, {}, {}, checkpointer.mesh.worker.world, str(torch.__version__), {})
    checkpointer.save(str(folder / "checkpoints"), tensors, manifest, Retention(keep=1), wait)
    checkpointer.finish()
    (outcome,) = checkpointer.outcomes()
    assert isinstance(outcome, Saved), outcome
    return outcome


def measure(worker: Worker, gigabytes: float, repeats: int, folder: Path) -> list[dict[str, float]]:
    mesh = join(worker, Layout.model_validate({"data": worker.world}))
    tensors, checkpointer = state(mesh, gigabytes), Checkpointer(mesh)
    size = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    save_seconds(checkpointer, folder, tensors, 0, wait=False)
    rows = []
    for repeat in range(repeats):
        copied = copy_seconds(mesh, source, target)
        stall = save_seconds(checkpointer, folder, tensors, 2 * repeat + 1, wait=False)
        written = dd_seconds(mesh, folder, size)
        waited = save_seconds(checkpointer, folder, tensors, 2 * repeat + 2, wait=True)
        rows.append(
            {
                "copy": copied,
                "stall": stall.stall_seconds,
                "background": stall.seconds,
                "dd": written,
                "save": waited.seconds,
            }
        )
    leave()
    return [{**row, "bytes": float(size)} for row in rows]


def one_of_several(rank: int, workers: int, port: int, gigabytes: float, repeats: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rows = measure(
        Worker(rank, workers, rank, workers, "127.0.0.1", port, "benchmark"), gigabytes, repeats, folder
    )
    (folder / f"rows-{rank}.json").write_text(json.dumps(rows))


def run(workers: int, gigabytes: float, repeats: int, folder: Path) -> list[dict[str, float]]:
    """Measure; where there are several workers, the slowest of each counts."""
    if workers == 1:
        return measure(Worker(0, 1, 0, 1, "", 0, "benchmark"), gigabytes, repeats, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    arguments = (workers, port, gigabytes, repeats, folder)
    processes = [context.Process(target=one_of_several, args=(rank, *arguments)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    parts = [json.loads((folder / f"rows-{rank}.json").read_text()) for rank in range(workers)]
    return [
        {key: max(part[number][key] for part in parts) for key in parts[0][number]}
        for number in range(repeats)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; left out: a temporary folder"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        rows = run(arguments.workers, arguments.gigabytes, arguments.repeats, folder)
    finally:
        shutil.rmtree(folder)
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = {
        "stall / plain copy": statistics.median(row["stall"] / row["copy"] for row in rows),
        "save / dd with fsync": statistics.median(row["save"] / row["dd"] for row in rows),
    }
    seconds = {key: round(median[key], 3) for key in ("copy", "stall", "background", "dd", "save")}
    rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
    print(
        json.dumps(
            {**vars(arguments), "bytes_each": int(median["bytes"]), "seconds": seconds, "ratio": rounded},
            default=str,
        )
    )


if __name__ == "__main__":
    main()
