"""A small network learns from a larger frozen one and from labels (Hinton et al. 2015).
Teacher and student are parts of one module with one sharding table. The two losses, against the teacher's
softened answers and against the labels, are recorded by name.

    python examples/programs/distillation.py
    shardwise verify examples/programs/distillation.py:program layout.tensor=2 layout.data=2 layout.zero=1
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

FEATURES, CLASSES, TEMPERATURE, HARD = 32, 10, 2.0, 0.3
TABLE = sw.Sharding(
    {"*.up": sw.columns(), "*.down": sw.rows(), "*.head": sw.columns(gather=True)},
    sequence_parallel=False,
)


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):  # (batch, features) to logits (batch, classes)
        return self.head(x + self.down(F.gelu(self.up(x))))


def make_teacher():
    """The same frozen network in every call. A real one would come from a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        teacher = Classifier(width=512)
        for matrix in (teacher.up, teacher.down, teacher.head):
            nn.init.xavier_normal_(matrix.weight, gain=2.0)
    return teacher.requires_grad_(False)


def teacher_and_student():
    return nn.ModuleDict({"teacher": make_teacher(), "student": Classifier(width=64)})


def labelled(count):
    """Random features, with labels drawn from the teacher's answers."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, FEATURES, generator=generator)
    answers = make_teacher()(features).softmax(-1)
    return TensorDataset(features, torch.multinomial(answers, 1, generator=generator).squeeze(1))


def loss(models, batch):
    features, labels = batch
    logits = models["student"](features)
    with torch.no_grad():
        answers = (models["teacher"](features) / TEMPERATURE).softmax(-1)
    soft = F.kl_div((logits / TEMPERATURE).log_softmax(-1), answers, reduction="sum") * TEMPERATURE**2
    hard = F.cross_entropy(logits, labels, reduction="sum")
    return {"soft": (1 - HARD) * soft, "hard": HARD * hard}, len(labels)


def program(engine):
    engine.prepare(teacher_and_student, sharding=TABLE)
    engine.optimizer("adamw", lr=6e-3)
    for batch in engine.batches(labelled(1024), global_batch=64, epochs=4):
        engine.forward_backward(loss, batch)
        engine.optim_step()


if __name__ == "__main__":
    print(sw.launch(program, workers=2))
