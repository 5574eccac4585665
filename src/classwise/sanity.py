"""Reasons to distrust a table of attacks, in the spirit of AutoAttack's checks, each one plain sentence.

Two kinds: facts that the attack itself noted (`sanity` in the metadata of its outcomes), and an attack that fools fewer
examples than a relative that should be weaker. No torch in here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from scipy.stats import binomtest

Facts = Mapping[str, Any]  # the metadata of one outcomes file
MODEL = ("dataset", "arch", "defense", "removed")

MARK = "⚠ "
ZERO_GRADIENT_SHARE = 0.05
CHANCE = 0.05

# kind: kinds that must not be stronger on the same model with the same epsilon. One step is less than many, and who
# cannot see the gradient knows less. targeted-pgd is not here: it may not take the easiest way out.
_HANDICAPPED = ("fgsm", "transfer", "nattack")
WEAKER_RELATIVES: dict[str, tuple[str, ...]] = {
    "pgd": _HANDICAPPED,
    "temperature-pgd": _HANDICAPPED,
    "cw-pgd": _HANDICAPPED,
    "cw-linf": _HANDICAPPED,
    "autoattack": (*_HANDICAPPED, "pgd"),
}


def report(outcomes: pd.DataFrame, files: Sequence[Facts]) -> list[str]:
    """The warnings about `outcomes`, gathered from the files whose metadata are `files`; seeds share a sentence."""
    return [*_noted(files), *_outdone(outcomes, files)]


def markdown(warnings: Sequence[str]) -> str:
    """The report as paragraphs for the end of a table."""
    if not warnings:
        return "Sanity: no warning (zero gradients, weaker than a weaker relative, randomised or not finite outputs).\n"
    count = f"Sanity: {len(warnings)} warning{'s' if len(warnings) > 1 else ''}."
    return "\n\n".join([count, *(MARK + warning for warning in warnings)]) + "\n"


# What the attack itself noted


def _zero_gradient(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.1f}" for share in (min(shares), max(shares)))
    return (
        f"{low if low == high else f'{low} to {high}'} % of the examples count as robust though their first gradient "
        "was zero. It vanished, as in a saturated softmax, so the attack may overstate the robustness."
    )


def _not_finite(counts: Sequence[int]) -> str:
    return (
        f"logits of {_examples(sum(counts))} are not finite (NaN or infinite). These were judged on their finite "
        "logits, or as misclassified if there are none."
    )


def _not_repeatable(counts: Sequence[int]) -> str:
    return (
        f"the model gave other logits for {_examples(sum(counts))} of the first batch when it was asked twice. Its "
        "outputs are randomised, so the attack may overstate the robustness."
    )


# key of `sanity`: what is more than this deserves the sentence about the values of all seeds that have it
NOTED: dict[str, tuple[float, Callable[[Sequence], str]]] = {
    "zero_gradient": (ZERO_GRADIENT_SHARE, _zero_gradient),
    "not_finite": (0, _not_finite),
    "not_repeatable": (0, _not_repeatable),
}


def _noted(files: Iterable[Facts]) -> list[str]:
    found: dict[tuple, dict[int, Any]] = {}
    for facts in files:
        for key, value in facts.get("sanity", {}).items():  # older files noted nothing
            if value > NOTED[key][0]:
                found.setdefault((key, _model(facts), facts["attack_id"]), {})[int(facts["seed"])] = value
    return [
        f"{attack} on {_called(model)}, {_seeds(values)}: {NOTED[key][1](list(values.values()))}"
        for (key, model, attack), values in found.items()
    ]


# An attack against its weaker relatives


def _outdone(outcomes: pd.DataFrame, files: Sequence[Facts]) -> list[str]:
    fooled = _fooled(outcomes)
    found: dict[tuple, dict[int, tuple[int, int, int]]] = {}
    for strong in files:
        for weak in files:
            if _related(strong, weak):
                counts = _counts(fooled[_attacked(strong)], fooled[_attacked(weak)])
                if weaker(*counts[:2]):
                    key = (_model(strong), strong["attack_id"], weak["attack_id"])
                    found.setdefault(key, {})[int(strong["seed"])] = counts
    sentences = []
    for (model, strong, weak), by_seed in found.items():
        only_strong, only_weak, both_saw = (sum(counts) for counts in zip(*by_seed.values(), strict=True))
        sentences.append(
            f"{strong} on {_called(model)}, {_seeds(by_seed)}: weaker than {weak}, which should be the weaker one. Of "
            f"{_examples(both_saw)}, {weak} alone fools {only_weak:,} and {strong} alone {only_strong:,}."
        )
    return sentences


def weaker(only_strong: int, only_weak: int) -> bool:
    """Whether the weak relative fools more than chance explains: one-sided exact sign test on who only one fools."""
    if only_weak <= only_strong:
        return False
    return binomtest(only_weak, only_weak + only_strong, alternative="greater").pvalue < CHANCE


def _related(strong: Facts, weak: Facts) -> bool:
    return (
        weak["attack"]["kind"] in WEAKER_RELATIVES.get(strong["attack"]["kind"], ())
        and strong["attack"]["epsilon"] == weak["attack"]["epsilon"]
        and (_model(strong), strong["seed"]) == (_model(weak), weak["seed"])
    )


def _fooled(outcomes: pd.DataFrame) -> dict[tuple, pd.Series]:
    """For each attacked model, fooled[index]."""
    wrong = (outcomes["predicted"] != outcomes["label"]).set_axis(outcomes["index"])
    by = [outcomes[name].to_numpy() for name in (*MODEL, "seed", "attack")]
    return dict(iter(wrong.groupby(by)))


def _counts(strong: pd.Series, weak: pd.Series) -> tuple[int, int, int]:
    """How many examples the strong attack alone fools, the weak one alone, and how many both have seen."""
    both = pd.concat([strong, weak], axis=1, join="inner", keys=["strong", "weak"])
    return (
        int((both["strong"] & ~both["weak"]).sum()),
        int((both["weak"] & ~both["strong"]).sum()),
        len(both),
    )


# Names


def _model(facts: Facts) -> tuple:
    return tuple(facts[name] for name in MODEL)


def _attacked(facts: Facts) -> tuple:
    return (*_model(facts), int(facts["seed"]), facts["attack_id"])


def _called(model: tuple) -> str:
    dataset, arch, defense, removed = model
    return f"{defense} ({', '.join([dataset, arch, *([] if removed == 'all' else [removed])])})"


def _seeds(seeds: Iterable[int]) -> str:
    *others, last = (str(seed) for seed in sorted(seeds))
    return f"seeds {', '.join(others)} and {last}" if others else f"seed {last}"


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"
