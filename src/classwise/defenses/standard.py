"""Standard training: cross entropy on clean images."""

from __future__ import annotations

import torch

from classwise.defenses.defense import Defense, Step


class Standard(Defense):
    def loss(self, model, x, y) -> Step:
        logits = model(x)
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return Step(losses.mean(), losses.detach(), natural=logits.detach())
