"""Direct preference optimisation (Rafailov et al. 2023) of a small language model.
Policy and frozen reference are parts of one module, so both are sharded in the same way. Two losses are
recorded by name: that of the preferences, and a part of the likelihood loss of the chosen answers.

    python examples/programs/dpo.py
    shardwise verify examples/programs/dpo.py:program layout.data=4 layout.zero=3
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

VOCABULARY, PROMPT, ANSWER = 16, 6, 6
BETA, LIKELIHOOD = 0.5, 0.1  # strength of the preferences, and weight of the likelihood loss


class LanguageModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(PROMPT + ANSWER, width)
        block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions(torch.arange(inputs.shape[1], device=tokens.device))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        logits = self.head(self.norm(self.blocks(x, mask=future)))
        logs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return logs[:, -ANSWER:].sum(1)


def policy_and_reference():
    """Both models. They begin with the same weights, which the reference keeps."""
    models = nn.ModuleDict({"policy": LanguageModel(), "reference": LanguageModel()})
    models["reference"].load_state_dict(models["policy"].state_dict())
    models["reference"].requires_grad_(False)
    return models


def preferences(count):
    """Pairs of sequences: the chosen answer repeats its prompt, the rejected one is random."""
    generator = torch.Generator().manual_seed(0)
    prompts, random = torch.randint(VOCABULARY, (2, count, PROMPT), generator=generator)
    return TensorDataset(torch.cat((prompts, prompts), 1), torch.cat((prompts, random), 1))


def loss(models, batch):
    pairs, count = torch.cat(batch), len(batch[0])
    policy = models["policy"](pairs)
    with torch.no_grad():
        reference = models["reference"](pairs)
    chosen, rejected = (BETA * (policy - reference)).split(count)  # the implicit rewards
    likelihood = -policy[:count].sum() / ANSWER
    return {"dpo": -F.logsigmoid(chosen - rejected).sum(), "likelihood": LIKELIHOOD * likelihood}, count


def program(engine):
    engine.prepare(policy_and_reference)
    engine.optimizer("adamw", lr=2e-3)
    for batch in engine.batches(preferences(512), global_batch=32, epochs=3):
        engine.forward_backward(loss, batch)
        engine.clip_grad_norm(1.0)
        engine.optim_step()


if __name__ == "__main__":
    print(sw.launch(program, workers=2))
