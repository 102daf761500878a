"""A bidirectional encoder learns to fill in the masked words of sentences.
A sentence's mask depends on its number alone, so it is the same on any layout; the loss counts masked words
only, whose number differs from batch to batch, and the engine divides by the number of the whole step.

    python examples/programs/masked_language_model.py
    shardwise verify examples/programs/masked_language_model.py:program layout.data=4 layout.zero=3
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import shardwise as sw

VOCABULARY, LENGTH, WIDTH, MASK, IGNORED = 32, 24, 64, 0, -100


class Sentences(Dataset):
    """Each sentence repeats one of eight phrases of eight words, beginning at any of them."""

    def __init__(self, count):
        self.phrases = torch.randint(1, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(0))
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        phrase, shift = index % 8, index // 8 % 8
        return {"number": index, "words": self.phrases[phrase].roll(shift).repeat(LENGTH // 8)}


def mask_words(samples):
    words = torch.stack([sample["words"] for sample in samples])
    masked = torch.zeros_like(words, dtype=torch.bool)
    for row, sample in zip(masked, samples, strict=True):
        generator = torch.Generator().manual_seed(sample["number"])
        share = 0.1 + 0.2 * torch.rand(1, generator=generator)
        row[:] = torch.rand(LENGTH, generator=generator) < share
    return {"inputs": words.masked_fill(masked, MASK), "targets": words.masked_fill(~masked, IGNORED)}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words):  # (batch, words) to logits (batch, words, vocabulary)
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.blocks(self.embedding(words) + self.positions(places)))


def loss(model, batch):
    logits, targets = model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()
    summed = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return summed, (targets != IGNORED).sum()


def program(engine):
    engine.prepare(Encoder)
    engine.optimizer("adamw", lr=1e-2)
    for batch in engine.batches(Sentences(1024), global_batch=32, epochs=2, collate=mask_words):
        engine.forward_backward(loss, batch)
        engine.clip_grad_norm(1.0)
        engine.optim_step()


if __name__ == "__main__":
    print(sw.launch(program, workers=2))
