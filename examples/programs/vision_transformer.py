"""A vision transformer in plain torch learns to tell the directions of noisy waves.
Its sharding table lets the heads and the inner features be split over the `tensor` axis.

    python examples/programs/vision_transformer.py
    shardwise verify examples/programs/vision_transformer.py:program layout.tensor=2 layout.data=2
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

SIZE, PATCH, WIDTH, HEADS, CLASSES = 16, 4, 64, 4, 8
ROLES = {
    **dict.fromkeys(("patches", "positions", "blocks.*.norm_*", "head"), sw.whole()),
    **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value"), sw.columns(HEADS)),
    **{"blocks.*.output": sw.rows(HEADS), "blocks.*.up": sw.columns(), "blocks.*.down": sw.rows()},
}
TABLE = sw.Sharding(ROLES, blocks="blocks", sequence_parallel=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attention(self, x):  # (batch, patches, width)
        # A device has some of the heads, so their number follows from the width that its matrices return.
        heads = [m(x).unflatten(-1, (-1, WIDTH // HEADS)) for m in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads))
        return self.output(mixed.transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Embedding((SIZE // PATCH) ** 2, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):  # (batch, 1, 16, 16)
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(x).mean(1))


def waves(count):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = (labels * torch.pi / CLASSES)[:, None, None]
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    return TensorDataset((images + 0.3 * torch.randn(images.shape, generator=generator))[:, None], labels)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def program(engine):
    engine.prepare(VisionTransformer, sharding=TABLE)
    engine.optimizer("adamw", lr=3e-3)
    for batch in engine.batches(waves(512), global_batch=32, epochs=3):
        engine.forward_backward(loss, batch)
        engine.optim_step()


if __name__ == "__main__":
    print(sw.launch(program, workers=2))
