"""A gated linear recurrence, the idea of Mamba (Gu and Dao 2023), learns what to remember.
The program keeps a mean of its losses in `engine.state`, which checkpoints save, and after every epoch it
records its accuracy on sequences that it has not seen.

    python examples/programs/recurrent.py
    shardwise verify examples/programs/recurrent.py:program layout.tensor=2 layout.data=2 layout.zero=1
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

TOKENS, KEYS, LENGTH, WIDTH, BATCH = 16, 8, 12, 32, 32
COLUMNS = {f"blocks.*.{name}": sw.columns() for name in ("forget", "write", "gate")}
ROLES = {"embedding": sw.vocabulary(), "blocks.*.norm": sw.whole(), **COLUMNS, "blocks.*.output": sw.rows()}
TABLE = sw.Sharding({**ROLES, "head": sw.columns(gather=True)}, blocks="blocks", sequence_parallel=False)


class Block(nn.Module):
    """For each feature, state = forget * state + (1 - forget) * write, where the token decides all three."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.forget, self.write, self.gate = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.output = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, time, width)
        normed = self.norm(x)
        forget, write = self.forget(normed).sigmoid(), self.write(normed)
        states = [torch.zeros_like(write[:, 0])]
        for now in range(x.shape[1]):
            states.append(forget[:, now] * states[-1] + (1 - forget[:, now]) * write[:, now])
        return x + self.output(torch.stack(states[1:], 1) * F.silu(self.gate(normed)))


def model():
    layers = {"embedding": nn.Embedding(TOKENS, WIDTH), "blocks": nn.Sequential(Block(), Block())}
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(WIDTH, KEYS)))


def last_keys(count, seed):
    """Sequences of keys and other tokens. The target at each time is the last key up to then."""
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] %= KEYS
    times = torch.where(tokens < KEYS, torch.arange(LENGTH), 0).cummax(1).values
    return TensorDataset(tokens, tokens.gather(1, times))


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def correct(model, batch):
    tokens, targets = batch
    return {"accuracy": (model(tokens).argmax(-1) == targets).sum()}, targets.numel()


def program(engine):
    train, held_out = last_keys(512, seed=0), last_keys(64, seed=1)
    engine.prepare(model, sharding=TABLE)
    engine.optimizer("adamw", lr=5e-3)
    for batch in engine.batches(train, global_batch=BATCH, epochs=3):
        engine.forward_backward(loss, batch)
        now = engine.optim_step()["loss"]
        engine.state["mean_loss"] = 0.9 * engine.state.get("mean_loss", now) + 0.1 * now
        engine.log(mean_loss=engine.state["mean_loss"])
        if engine.step * BATCH % len(train) == 0:
            engine.log(**engine.evaluate(correct, held_out))


if __name__ == "__main__":
    print(sw.launch(program, workers=2))
