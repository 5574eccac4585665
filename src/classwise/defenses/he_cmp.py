"""HE-CMP (tian20 App. G): hypersphere embedding whose scale holds the maximum probability to a rising schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from classwise.attacks.pgd import Inner
from classwise.defenses.defense import Run, evaluating
from classwise.defenses.hypersphere import CountFrom, Hypersphere, ramp
from classwise.errors import UserError
from classwise.parameters import Count, Fraction01, Positive

BATCH = 500


class HeCmp(Hypersphere):
    """The source does not say whose cosines the equation is solved for; `reading` lists what it may mean.

    `data` takes the mean of sorted cosine vectors because the printed Table 6 wants a final scale above 100, which
    follows from gaps of 0.2 to 0.35 between top and wrong cosines; `largest`, the example with the largest top cosine,
    would give about 40. Probability 1 has no finite scale: `s_max` says where it ends.
    """

    def __init__(
        self,
        run: Run,
        *,
        attack: Inner,
        reading: Annotated[
            Literal["bound", "data", "example"],
            Field(description="cosines 1 and -1; those of a fixed sample before each epoch; each image's own"),
        ] = "data",
        summary: Annotated[
            Literal["mean", "largest"],
            Field(description="of reading data: the mean sorted cosines, or the example with the largest cosine"),
        ] = "mean",
        examples: Annotated[Count, Field(description="size of the sample of reading data")] = 1000,
        first_probability: Fraction01 = 0.2,
        final_probability: Fraction01 = 1.0,
        over: Count | None = None,
        count_from: CountFrom = 0,
        s_max: Positive = 150.0,
    ):
        super().__init__(run, attack, scale=1.0)  # until `epoch_start` knows better
        for name, value in (("first_probability", first_probability), ("final_probability", final_probability)):
            if value <= 1 / len(run.classes):
                raise UserError(f"{name} = {value}: must be above 1/{len(run.classes)}, which scale 0 gives")
        self.reading, self.summary, self.examples, self.s_max = reading, summary, examples, s_max
        self.first, self.final, self.count_from = first_probability, final_probability, count_from
        self.probability = first_probability
        self.over = over or max(1, round(0.9 * run.epochs))  # 90 of 100 in the paper

    def epoch_start(self, epoch, model, sample) -> None:
        self.probability = ramp(self.first, self.final, epoch - 1 + self.count_from, self.over)
        sentence = f"epoch {epoch}: maximum probability {self.probability:.4g}"
        if self.reading == "example":
            self.run.note(f"{sentence} for each image")
            return
        self.scale = scale_for(self._gaps(model, sample), self.probability, self.s_max)
        self.run.note(f"{sentence} by scale {self.scale:.4g}")

    def _gaps(self, model, sample) -> np.ndarray:
        """top - wrong[class], of the reading's one vector of cosines."""
        if self.reading == "bound":
            return np.full(len(self.run.classes) - 1, 2.0)
        with evaluating(model) as bare, torch.no_grad():
            cosines = torch.cat([bare(x) for x in sample(self.examples)[0].split(BATCH)]).double()
        falling = cosines.sort(dim=1, descending=True).values
        one = falling.mean(dim=0) if self.summary == "mean" else falling[falling[:, 0].argmax()]
        return (one[0] - one[1:]).cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "probability": self.probability}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.probability = state["probability"]

    def scales(self, cosines) -> torch.Tensor | float:
        if self.reading != "example":
            return self.scale
        falling = cosines.double().sort(dim=1, descending=True).values
        gaps = (falling[:, :1] - falling[:, 1:]).cpu().numpy()
        found = [scale_for(each, self.probability, self.s_max) for each in gaps]
        return torch.tensor(found, dtype=cosines.dtype, device=cosines.device)[:, None]


def scale_for(gaps: np.ndarray, probability: float, s_max: float) -> float:
    """The s at which softmax(s c) has the top probability 1 / (1 + sum exp(-s gap)) = `probability`, at most `s_max`.

    By Powell's hybrid method, as in the paper, because for probability 1 the method itself decides: it walks until
    float64 is saturated. It starts at 1, the cosines as they are, of which the paper says nothing.
    """
    from scipy.optimize import root

    def missing(s: np.ndarray) -> np.ndarray:
        return probability - 1 / (1 + np.exp(-s * gaps).sum())

    with np.errstate(over="ignore"):  # a trial step below 0 may be anything
        found = root(missing, 1.0, method="hybr").x[0]
    return float(np.clip(found, 0.0, s_max))
