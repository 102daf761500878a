"""Drivers without lockstep, against lockstep in the same run: four workers, real processes, the bundled text.

    python benchmarks/asynchronous.py staleness [--steps 1500] [--seeds 3] [--portions 4]
                                                [--plot docs/staleness.svg]
    python benchmarks/asynchronous.py uneven [--steps 80]
    python benchmarks/asynchronous.py local [--steps 1500] [--seeds 3] [--rate 100mbit]
    python benchmarks/asynchronous.py throughput [--rounds 8]
    python benchmarks/asynchronous.py hogwild [--steps 20] [--seeds 3]

- `staleness`: the held-out loss after the same number of updates for each bound, and the measured staleness.
  With --portions 1 each gradient is one update, so that the gradients of four workers become stale.
- `uneven`: one of four workers takes four times as long (uneven_model.py). Measures the time to a held-out
  loss that lockstep reaches.
- `local`: two hosts of two workers, with a slow link between them (slow_link.py). Groups that exchange
  weights every 50 steps, against DDP; the first third of both runs is trained in lockstep.
- `throughput`: how fast a server of 50 M parameters exchanges gradients and weights with four workers that
  compute nothing, against gloo's sends.
- `hogwild`: a sparse model (examples/ngrams.py) with one process, and with two, without and with a lock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from convergence import draw
from slow_link import HOSTS, OURS, cable, limit

ROOT = Path(__file__).parents[1]
SMALL = [
    "examples/quickstart.toml", "model.preset=bytes-400k", "data.sequence_length=64", "train.global_batch=8",
    "train.learning_rate=1e-3", "optimizer.betas=[0.9, 0.99]", "train.final_learning_rate=0",
    "checkpoint.every=0",
    "observe.sample=",
]  # fmt: skip
CABLE_STEPS = 60
"""Number of synchronous steps over the slow cable, which are run for their speed alone."""
Records = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["staleness", "uneven", "local", "throughput", "hogwild"])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--portions", type=int, default=4)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        match given.what:
            case "staleness":
                staleness(Path(folder), given.steps or 1500, given.seeds, given.portions, given.plot)
            case "uneven":
                uneven(Path(folder), given.steps or 80)
            case "local":
                local(Path(folder), given.steps or 1500, given.rate, given.seeds)
            case "throughput":
                throughput(given.rounds)
            case "hogwild":
                hogwild(Path(folder), given.steps or 20, given.seeds)


# -- staleness -----------------------------------------------------------------------------------------------


def staleness(folder: Path, steps: int, seeds: int, portions: int, plot: Path | None) -> None:
    curves: dict[tuple[str, int], dict[int, float]] = {}
    seen: dict[str, Counter[int]] = {}
    ways = {"synchronous": ["layout.zero=0"]}
    ways |= {f"bound {bound}": ["train.driver=server", f"server.portions={portions}",
    f"server.max_staleness={bound}"]
             for bound in (0, 1, 4, 16, "unbounded")}  # fmt: skip
    for seed in range(1, seeds + 1):
        for name, words in ways.items():
            run = folder / f"{name} {seed}".replace(" ", "-")
            job = [*SMALL, "train.learning_rate=5e-4", f"train.steps={steps}", f"train.warmup={steps // 10}"]
            train(
                run,
                [*job, f"train.evaluate_every={steps // 6}", f"train.seed={seed}", "layout.data=4", *words],
            )
            curves[name, seed] = {
                record["step"]: record["held_out_loss"]
                for record in records(run)
                if "held_out_loss" in record
            }
            seen.setdefault(name, Counter()).update(
                age for record in records(run) for age in record.get("staleness", [0])
            )
            print(f"  {name:16} seed {seed}: {curves[name, seed][steps]:.4f}", file=sys.stderr, flush=True)
    base = statistics.mean(curves["synchronous", seed][steps] for seed in range(1, seeds + 1))
    print(
        f"{'':16} held-out loss after {steps} updates, {seeds} seeds   mean    to synchronous   staleness: "
        f"mean, most"
    )
    for name in ways:
        losses = [curves[name, seed][steps] for seed in range(1, seeds + 1)]
        mean, ages = statistics.mean(losses), seen[name]
        average = sum(age * count for age, count in ages.items()) / ages.total()
        shown = "  ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:16} {shown:44} {mean:.4f}  {mean / base - 1:+.2%}           {average:.2f}  {max(ages)}")
    if plot:
        draw(curves, list(ways), list(range(1, seeds + 1)), plot)


# -- uneven workers ------------------------------------------------------------------------------------------


def uneven(folder: Path, steps: int) -> None:
    slow = folder / "slow"
    job = [
        "examples/own_model.toml", "model.module=benchmarks/uneven_model.py:Uneven", "train.global_batch=16",
        "train.micro_batch=4", "layout.data=4", "train.evaluate_every=10", "train.evaluate_sequences=32",
        "checkpoint.every=0",
        "observe.sample=", "train.learning_rate=1e-3", "train.warmup=20",
    ]  # fmt: skip
    fine = [
        "train.driver=server",
        "server.portions=8",
    ]  # two for each worker: the slow one is waited for half as long
    ways = {
        "synchronous": (steps, ["layout.zero=0"]),
        "server, bound 4": (2 * steps, [*fine, "server.max_staleness=4"]),
        "backup workers": (steps, [*fine, "server.backups=true"]),
        "rows by speed": (steps, ["layout.zero=0", "train.driver=by-speed"]),
    }
    target, base = None, 0.0
    for name, (count, words) in ways.items():
        run = folder / name.replace(" ", "-").replace(",", "")
        slow.write_text("")
        process = begin(
            run, [*job, f"train.steps={count}", "train.schedule=constant", *words], {"UNEVEN_SLOW": str(slow)}
        )
        slow.write_text(f"{_a_worker(run, process)} 4")
        finish(run, process)
        curve = _by_time(run)
        target = target or curve[2 * len(curve) // 3][1]
        seconds = next((at for at, loss in curve if loss <= target), None)
        base = base or seconds or 0.0
        took = "not reached" if seconds is None else f"{seconds:6.1f} s, {base / seconds:.2f} times as quick"
        last = records(run)[-1]
        rows = f"; rows {last['rows']}" if "rows" in last else ""
        print(
            f"{name:16} held-out loss {target:.4f} after {took}; ends at {curve[-1][1]:.4f}{rows}", flush=True
        )


def _a_worker(run: Path, process: subprocess.Popen[bytes]) -> int:
    """The process id of one that computes."""
    while process.poll() is None:
        for path in (run / "logs").glob("workers-*.json"):
            known = json.loads(path.read_text())["workers"]
            if len(records(run)) >= 1:
                return int(([one for one in known if one["loose"]] or known)[1]["pid"])
        time.sleep(0.05)
    sys.exit((run / "output").read_text())


def _by_time(run: Path) -> list[tuple[float, float]]:
    """(seconds since the first step, held-out loss) of each evaluation."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    begun = _time(events[0])
    return [
        (_time(event) - begun, event["held_out_loss"]) for event in events if event["event"] == "evaluate"
    ]


def _time(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


# -- groups over a slow link ---------------------------------------------------------------------------------


def local(folder: Path, steps: int, rate: str, seeds: int) -> None:
    """A third of the steps in lockstep on one site, then the rest by groups on two. What lockstep would have
    come to is trained without the cable, which changes no bit; its speed and bytes are those of its first
    steps over the cable."""
    begin_at = steps // 3
    job = [*SMALL, "model.preset=bytes-2m", "train.warmup=100"]
    job += [f"checkpoint.every={begin_at}", "checkpoint.keep=4", f"train.evaluate_every={steps}"]
    lockstep = ["layout.data=4", "layout.zero=0"]
    groups = [
        "train.driver=local",
        "local.groups=2",
        "local.sync_every=50",
        "local.learning_rate=1",
        "local.momentum=0.5",
    ]
    groups += ["layout.data=2", "layout.zero=0"]
    ways = {
        "local": groups,
        "local, streaming": [*groups, "local.fragments=5", "local.overlap=5"],
        "local, int4": [*groups, "local.compression=int4"],
    }
    with cable():
        limit(rate)
        run = folder / "lockstep-cable"
        quick, wire = over_the_cable(run, [*job, *lockstep, f"train.steps={CABLE_STEPS}"], CABLE_STEPS)
        print(
            f"lockstep: {1e3 * quick:.1f} ms a step, {wire / 1e3:.1f} kB a step through the cable", flush=True
        )
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for seed in range(1, seeds + 1):
            whole = [*job, f"train.steps={steps}", f"train.seed={seed}"]
            train(reference := folder / f"lockstep-{seed}", [*whole, *lockstep])
            base = records(reference)[-1]["held_out_loss"]
            for name, words in ways.items():
                run = folder / f"{name} {seed}".replace(" ", "-").replace(",", "")
                begun = Path("checkpoints") / f"step-{begin_at}"
                shutil.copytree(reference / begun, run / begun)
                seconds, sent_bytes = over_the_cable(run, [*whole, *words], steps - begin_at)
                loss = records(run)[-1]["held_out_loss"]
                found[name].append((loss / base - 1, quick / seconds, wire / sent_bytes))
                print(
                    f"  seed {seed}: {name} {loss:.4f}, lockstep {base:.4f}: {found[name][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
    for name, runs in found.items():
        loss, quicker, less = (statistics.mean(column) for column in zip(*runs, strict=True))
        print(
            f"{name:17} held-out loss {loss:+.2%}, {quicker:.2f} times as quick, 1/{less:.1f} of the bytes "
            f"through the cable"
        )


def over_the_cable(run: Path, words: list[str], steps: int) -> tuple[float, float]:
    """Train this many steps over the cable, and return the seconds and the bytes of one step."""
    before = sent()
    together(run, words)
    steady = records(run)[10:]
    return sum(record["seconds"] for record in steady) / len(steady), (sent() - before) / steps


def together(run: Path, words: list[str]) -> None:
    """Two workers on each host."""
    processes = []
    for rank, host in enumerate(HOSTS):
        environment = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
            "PET_NNODES": "2",
        }
        environment |= {
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(rank),
            "PET_RDZV_ENDPOINT": f"{HOSTS['a']}:29400",
        }
        command = ["ip", "netns", "exec", f"{OURS}{host}", sys.executable, "-m", "shardwise", "train", *words]
        with (run.parent / f"{run.name}-{host}.err").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [*command, f"run.folder={run}"],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd=ROOT,
                )
            )
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("\n".join((run.parent / f"{run.name}-{host}.err").read_text() for host in HOSTS))


def sent() -> int:
    """Bytes that went through the cable, both ways."""
    total = 0
    for host in HOSTS:
        words = ["ip", "netns", "exec", f"{OURS}{host}", "cat", "/sys/class/net/wire/statistics/tx_bytes"]
        total += int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return total


# -- without a lock ------------------------------------------------------------------------------------------


def hogwild(folder: Path, steps: int, seeds: int) -> None:
    """Updates a second of all steps but the first five, with data and meetings; the held-out loss;
    conflicts."""
    job = [
        "examples/ngrams.toml",
        f"train.steps={steps}",
        "train.global_batch=256",
        "observe.sample=",
        "checkpoint.every_minutes=0",
    ]
    ways = {
        "one process": ["layout.data=1"],
        "two": ["layout.data=2"],
        "two, locked": ["layout.data=2", "hogwild.locked=true"],
    }
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for seed in range(1, seeds + 1):
        for name, words in ways.items():
            run = folder / f"{name} {seed}".replace(" ", "-").replace(",", "")
            train(run, [*job, f"train.seed={seed}", *words])
            steady = records(run)[5:]
            total = Counter[str]()
            for record in steady:
                total.update(record["updates"])
            speed = total["made"] / sum(record["seconds"] for record in steady)
            shares = total["conflicting"] / total["made"], total["conflicting_rows"] / total["rows"]
            found[name].append((speed, records(run)[-1]["held_out_loss"], *shares))
            print(f"  {name:12} seed {seed}: {found[name][-1]}", file=sys.stderr, flush=True)
    base = [statistics.mean(column) for column in zip(*found["one process"], strict=True)]
    print(f"{256 * steps} updates of 64 bytes, {seeds} seeds")
    for name, runs in found.items():
        speed, loss, updates, rows = (statistics.mean(column) for column in zip(*runs, strict=True))
        print(
            f"{name:12} {speed:6.0f} updates/s ({speed / base[0]:.2f} times one), held-out loss {loss:.4f} "
            f"({loss / base[1] - 1:+.2%}), conflicts in {updates:.1%} of updates and {rows:.2%} of rows"
        )


# -- throughput ----------------------------------------------------------------------------------------------

NUMBERS, WORKERS = 50_000_000, 4


def throughput(rounds: int) -> None:
    """Measure a server: it sums 4 pushes, updates and publishes the weights, and workers pull them."""
    for attempt in range(3):
        gloo, own = _by_gloo(rounds), _by_server(rounds)
        print(
            f"{attempt + 1}: gloo {WORKERS * rounds / gloo:.2f} exchanges of 200 MB each way a second, the "
            f"server "
            f"{WORKERS * rounds / own:.2f} ({rounds / own:.2f} updates/s): {gloo / own:.0%}",
            flush=True,
        )


def _by_gloo(rounds: int) -> float:
    context = multiprocessing.get_context("spawn")
    port, times = 29517, context.Queue()
    ranks = [
        context.Process(target=_gloo_rank, args=(rank, port, rounds, times)) for rank in range(WORKERS + 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return float(times.get())


def _gloo_rank(rank: int, port: int, rounds: int, times: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS + 1)
    tensors = [torch.ones(NUMBERS) for _ in range(2 if rank else 1 + WORKERS)]
    dist.barrier()
    began = time.perf_counter()
    for _ in range(rounds):
        if rank:
            dist.recv(tensors[0], src=0)
            dist.send(tensors[1], dst=0)
            continue
        sends = [dist.isend(tensors[0], dst=peer + 1) for peer in range(WORKERS)]
        receives = [dist.irecv(tensors[1 + peer], src=peer + 1) for peer in range(WORKERS)]
        for work in (*sends, *receives):
            if work is not None:
                work.wait()
    dist.barrier()
    if not rank:
        times.put(time.perf_counter() - began)
    dist.destroy_process_group()


def _by_server(rounds: int) -> float:
    import torch

    from shardwise.asynchronous.gradient_store import GradientStore
    from shardwise.asynchronous.listener import Listener
    from shardwise.asynchronous.portions import Portions
    from shardwise.asynchronous.scheduler import Scheduler
    from shardwise.resilience.channel import Credentials

    torch.set_num_threads(1)
    warm_up = 2
    store = GradientStore({"weight": (slice(0, NUMBERS),)}, torch.float32)
    scheduler = Scheduler(Portions(portions=WORKERS, updates=rounds + warm_up, max_staleness=0))
    weights = torch.ones(NUMBERS)
    store.publish(0, weights.clone())
    listener = Listener("127.0.0.1", Credentials("server", b"benchmark"), store, scheduler)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_pusher, args=(listener.port,)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    began = 0.0
    for version in range(1, rounds + warm_up + 1):
        if version == warm_up + 1:
            began = time.perf_counter()
        while (update := scheduler.due(1.0)) is None:
            pass
        taken = store.take(update.keys, update.brought, update.dropped)
        for gradient in taken:
            weights.add_(gradient, alpha=-1e-3)
        store.give_back(taken)
        store.publish(version, weights.clone())
        scheduler.made(update)
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    listener.close()
    return seconds


def _pusher(port: int) -> None:
    import torch

    from shardwise.asynchronous import messages
    from shardwise.asynchronous.wire import dial
    from shardwise.resilience.channel import Credentials

    torch.set_num_threads(1)
    wire, weights, gradient = (
        dial("127.0.0.1", port, Credentials("server", b"benchmark")),
        torch.empty(NUMBERS),
        torch.ones(NUMBERS),
    )

    def said(message: Any, tensor: Any = None) -> Any:
        wire.send(messages.to_json(message), tensor)
        text, behind = wire.receive()
        if behind:
            wire.read(weights)
        return messages.from_json(text)

    said(messages.Hello(f"{os.getpid()}-{threading.get_ident()}"))
    have = -1
    while not isinstance(task := said(messages.Ask()), messages.End):
        if isinstance(task, messages.Task):
            have = said(messages.Pull(task.version, have)).version
            said(messages.Push(task.portion), gradient)
            said(messages.Bring(task.portion, 1.0, 1, 1, 1))


# -- runs ----------------------------------------------------------------------------------------------------


def train(run: Path, words: list[str]) -> None:
    finish(run, begin(run, words, {}))


def begin(run: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    run.mkdir()
    with (run / "output").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", *words, f"run.folder={run}"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )


def finish(run: Path, process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit((run / "output").read_text())


def records(run: Path) -> Records:
    path = run / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


if __name__ == "__main__":
    main()
