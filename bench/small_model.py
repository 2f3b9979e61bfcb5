"""Real training state in a quarter of a minute: a small transformer that learned the repository's own documents.

Codecs are judged by what optimizers leave behind. Synthetic normal numbers compress otherwise, and steps made up
of random flips compress better than real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

VOCAB, WIDTH, LAYERS, CONTEXT, BATCH = 256, 512, 4, 64, 8
WARM_STEPS, WARM_LR, LR = 30, 3e-4, 1e-6
LATER = (1, 3, 10)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Bytes of the whole model, tensors end to end: BF16 weights before and after as many updates, FP32 state."""

    before: Bytes
    later: dict[int, Bytes]
    master: Bytes
    exp_avg: Bytes
    exp_avg_sq: Bytes


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCAB)
        for each in self.parameters():
            if each.dim() > 1:
                torch.nn.init.normal_(each, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found: torch.Tensor = self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))
        return found


def train() -> Trained:
    """Forty updates of a BF16 model with FP32 master weights and Adam, the last ten at the rate of RL."""
    torch.manual_seed(0)
    folder = Path(__file__).parent.parent / "docs"
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = _Model()
    masters = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=WARM_LR)

    def update() -> None:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        tokens = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for master, each in zip(masters, model.parameters(), strict=True):
                each.copy_(master.bfloat16())  # the model computes with what the actor's weights can hold

    def weights() -> Bytes:
        return _bytes([master.bfloat16() for master in masters])

    for _ in range(WARM_STEPS):
        update()
    optimizer.param_groups[0]["lr"] = LR
    before, later = weights(), {}
    for step in range(1, LATER[-1] + 1):
        update()
        if step in LATER:
            later[step] = weights()
    state = [optimizer.state[master] for master in masters]
    return Trained(
        before=before,
        later=later,
        master=_bytes(masters),
        exp_avg=_bytes([each["exp_avg"] for each in state]),
        exp_avg_sq=_bytes([each["exp_avg_sq"] for each in state]),
    )


def _bytes(tensors: list[torch.Tensor]) -> Bytes:
    return np.concatenate([each.flatten().view(torch.uint8).numpy() for each in tensors])
