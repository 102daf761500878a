"""Peak host memory of an export and an import of a 1 GB model, each in a separate process.

    python benchmarks/export_memory.py

prints one JSON object: for each of the following the peak resident memory of the process, this peak as a
share of the model's bytes, and the seconds. `export` and `import` are the commands as a user runs them.
`whole` is the usual way, for comparison: read every tensor, then write one file with the safetensors library.
`nothing` is a process that only imports torch. The peak is the kernel's (VmHWM), which counts pages of mapped
files too. Needs Linux, and three times the model on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents, write_checkpoint
from shardwise.cli.app import app
from shardwise.config import Model
from shardwise.config.parameters import parameter_shapes

MODEL = Model(layers=16, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=2816, vocabulary=32000)  # type: ignore[call-arg]
WAYS = {
    "nothing": [],
    "whole": ["step-0", "whole.safetensors"],
    "export": ["step-0", "out"],
    "export --dtype bfloat16": ["step-0", "out-bfloat16", "--dtype", "bfloat16"],
    "import": ["out", "imported"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    inside = parser.parse_args().inside
    if inside is not None:
        run(inside[0], inside[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        manifest = Manifest(0, MODEL.settings(), {}, {"tokenizer": "bytes"}, {}, {}, 1, torch.__version__, {})
        write_checkpoint(Path(folder) / "step-0", manifest, random_weights())
        model_bytes = Contents.open(Path(folder) / "step-0").manifest.total_bytes
        found = {way: measure(way, folder, model_bytes) for way in WAYS}
    print(json.dumps({"model_bytes": model_bytes, "peaks": found}, indent=1))


def random_weights() -> Iterator[tuple[StateKey, Tensor]]:
    for name, shape in parameter_shapes(MODEL).items():
        yield StateKey.model(name), torch.randn(shape)


def measure(way: str, folder: str, model_bytes: int) -> dict[str, float]:
    """In a fresh process, which tells its own peak as it ends."""
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__).absolute()), "--inside", way.split()[0], *WAYS[way]]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    peak = int(done.stdout.splitlines()[-1])
    return {
        "bytes": peak,
        "of_model": round(peak / model_bytes, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }


def run(way: str, arguments: list[str]) -> None:
    if way == "whole":
        contents = Contents.open(arguments[0])
        save_file({str(key): contents.read(key) for key in contents.tensors}, arguments[1])
    elif way != "nothing":
        app(["checkpoint", way, *arguments], standalone_mode=False)
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()
