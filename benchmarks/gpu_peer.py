"""torchtitan's model on one GPU, to run in the same hour as `gpu.py`.

    python benchmarks/gpu_peer.py [1b] [8b] [--float8] [--steps 20]

Needs torchtitan and, for float8, torchao: `pip install torchtitan==0.2.2 torchao`. The steps are those of its
trainer on one device, without files and logs: its Llama, compiled block by block, its compiled loss, bfloat16
autocast (`8b`: everything in bfloat16), clipping and fused AdamW. With `--float8`, all linear layers except
the head use torchao's tensorwise recipe, as torchtitan's documentation recommends. The jobs are those of
`gpu.py`, on one batch of tokens that is repeated.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from gpu import shortest_loop
from torch import Tensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

LENGTH, VOCABULARY = 8192, 128_256
JOBS: dict[str, tuple[dict[str, Any], int, torch.dtype]] = {
    "1b": ({"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "multiple_of": 256}, 4, torch.float32),
    "8b": ({"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}, 1, torch.bfloat16),
}
"""The sizes, the sequences of a step and the dtype of the states."""


def measure(name: str, float8: bool, step_count: int) -> dict[str, Any]:
    sizes, batch, dtype = JOBS[name]
    settings = TransformerModelArgs(
        n_heads=32, n_kv_heads=8, vocab_size=VOCABULARY, rope_theta=500_000, max_seq_len=LENGTH, **sizes
    )
    torch.set_default_dtype(dtype)
    with torch.device("cuda"), torch.no_grad():
        model = Transformer(settings)
        model.init_weights()
    torch.set_default_dtype(torch.float32)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model, config=Float8LinearConfig(), module_filter_fn=lambda _, path: path != "output"
        )
    for block in model.layers.values():
        block.compile(fullgraph=True)
    compiled_loss = torch.compile(cross_entropy_loss)
    tokens = torch.randint(0, VOCABULARY, (1, batch, LENGTH + 1), device="cuda")

    def loss_of(rows: Tensor) -> Tensor:
        loss: Tensor = compiled_loss(model(rows[:, :-1]), rows[:, 1:]) / (batch * LENGTH)  # type: ignore[no-untyped-call]
        return loss

    return shortest_loop(model, tokens, loss_of, batch * LENGTH, step_count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", default=["1b"], choices=[*JOBS, []])
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for name in options.jobs or ["1b"]:
        print(
            json.dumps(
                {"job": name, "float8": options.float8, **measure(name, options.float8, options.steps)}
            ),
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
