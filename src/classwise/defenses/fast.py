"""Fast adversarial training (Wong et al., 2020): one large step from a random start."""

from __future__ import annotations

from typing import Any

import torch

from classwise.attacks.pgd import ascend, cross_entropy, pgd
from classwise.defenses.defense import Defense, Run, Step, evaluating
from classwise.parameters import Count, Epsilon, Fraction01, Parameters, Positive, Start


class Guard(Parameters):
    """Against catastrophic overfitting: stop when PGD on the epoch's first batch succeeds far more often."""

    drop: Fraction01 = 0.2
    steps: Count = 5
    step_size: Positive | None = None  # a quarter of epsilon: 2/255 of 8/255


class Fast(Defense):
    """Batch norm is in training mode in the attack as well, so that both passes move its statistics."""

    def __init__(
        self,
        run: Run,
        *,
        epsilon: Epsilon,
        step_size: Positive | None = None,
        start: Start = "R3",
        guard: Guard | None = None,
    ):
        super().__init__(run)
        self.ball = {"epsilon": epsilon, "start": start, "generator": run.generator}
        self.step_size, self.guard = step_size or 1.25 * epsilon, guard
        self.epoch, self.first_batch = 0, None
        self.robust, self.kept = 0.0, {}  # what the guard found after the last epoch, and the weights of then

    def loss(self, model, x, y) -> Step:
        self.first_batch = self.first_batch or (x, y)
        adversarial = ascend(model, x, cross_entropy(y), steps=1, step_size=self.step_size, **self.ball)
        logits = model(adversarial)
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return Step(losses.mean(), losses.detach(), adversarial=logits.detach())

    def epoch_start(self, epoch, model, sample) -> None:
        self.epoch, self.first_batch = epoch, None

    def epoch_end(self, per_class, model) -> None:
        if self.guard is None:
            return
        robust = self.run.mean(self._robust(model, *self.first_batch))
        if self.robust - robust > self.guard.drop:
            self.run.note(
                f"epoch {self.epoch}: catastrophic overfitting, robust accuracy fell from {100 * self.robust:.1f} % to "
                f"{100 * robust:.1f} % on a batch; training stops with the weights of epoch {self.epoch - 1}"
            )
            model.load_state_dict(self.kept)
            self.stopped = True
            return
        self.robust = robust
        self.kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def _robust(self, model, x, y) -> float:
        """In evaluation mode, unlike the authors' code: a guard should not move what it watches."""
        size = self.guard.step_size or self.ball["epsilon"] / 4
        with evaluating(model) as bare:
            adversarial = pgd(bare, x, y, steps=self.guard.steps, step_size=size, **self.ball)
            with torch.no_grad():
                return (bare(adversarial).argmax(dim=1) == y).double().mean().item()

    def state_dict(self) -> dict[str, Any]:
        first = self.first_batch if self.guard is not None else None
        return {name: getattr(self, name) for name in STATE} | {"first_batch": first and list(first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
        device = self.run.generator.device
        self.first_batch = state["first_batch"] and tuple(part.to(device) for part in state["first_batch"])


STATE = ("epoch", "robust", "kept", "stopped")
