"""Speed of the codecs, relative to the memory bandwidth.

    python benchmarks/codec_speed.py [--numbers 268435456] [--feedback]

To encode, a codec must read n float32 numbers and write its bytes; to decode, read those and write n numbers.
"bound" is the time for this at the bandwidth of a plain copy on this device, measured in the same run.
"plain" is the same arithmetic in separate torch operations: on a GPU, the code that a CPU runs. With
--feedback, encoding also computes the residual in place, as a run with error feedback does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from shardwise.codecs import RowCodec, blocks, parse_row_codec, randomk, topk

CODECS = (
    "bfloat16", "float16", "float8",
    "int8", "int4", "qsgd(8)", "qsgd(4)", "qsgd(3)", "qsgd(2)", "terngrad", "sign",
    "topk(0.01)",
    "randomk(0.01)",
)  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=1 << 28 if DEVICE == "cuda" else 1 << 23)
    parser.add_argument("--codecs", default=";".join(CODECS))
    parser.add_argument("--feedback", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = torch.randn(1, given.numbers, device=DEVICE)
    target = torch.empty_like(rows)
    bandwidth = 2 * rows.nbytes / seconds(lambda: target.copy_(rows))
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "one CPU thread"
    print(
        f"{name}, torch {torch.__version__}, {given.numbers / 1e6:.0f} M numbers; a copy moves "
        f"{bandwidth / 1e9:.0f} GB/s"
    )
    print(f"{'':14} {'encode':>10} {'decode':>10} {'bound':>10} {'of bound':>9} {'plain':>10}")
    for text in given.codecs.split(";"):
        rows.normal_()
        codec = parse_row_codec(text)
        wire = codec.encode(rows, 1)
        encode, decode = times(codec, rows, wire, target, given.feedback)
        bound = 2 * (rows.nbytes + wire.nbytes) / bandwidth
        with (
            mock.patch.object(blocks, "runs_kernels", return_value=False),
            mock.patch.object(topk, "runs_kernels", return_value=False),
            mock.patch.object(randomk, "runs_kernels", return_value=False),
            mock.patch.object(blocks, "CACHED_NUMBERS", given.numbers),
        ):
            plain = sum(times(codec, rows, wire, target, given.feedback))
        cells = " ".join(f"{each * 1e6:8.0f}us" for each in (encode, decode, bound))
        print(
            f"{text:14} {cells} {bound / (encode + decode):8.0%} {plain / (encode + decode):9.1f}x",
            flush=True,
        )


def times(codec: RowCodec, rows: Tensor, wire: Tensor, target: Tensor, take: bool) -> tuple[float, float]:
    """Seconds to encode, and to decode."""
    return seconds(lambda: codec.encode(rows, 1, take)), seconds(lambda: codec.decode(wire, target, 1))


def seconds(work: Callable[[], object], runs: int = 10) -> float:
    """The least of some runs."""
    found = []
    for _ in range(runs + 2):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        found.append(time.perf_counter() - began)
    return min(found[2:])


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
