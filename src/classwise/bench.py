"""What attacks cost: ours and other libraries' on the same model and images, in turn.

The peers (torchattacks, foolbox, ART) come with the `test` extra and are imported only here, inside the functions that
measure them. Everybody is measured to the same end: adversarial images, and the float32 prediction of each. A run
includes what is done once for a model (wrapping it, or preparing it for attack).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from classwise.attacks.cw_linf import cw_linf
from classwise.attacks.nattack import nattack
from classwise.attacks.pgd import pgd
from classwise.attacks.target import Target
from classwise.devices import memory_mb, most_memory_mb
from classwise.engine import prepared
from classwise.errors import UserError
from classwise.models.classifier import Classifier

Batch = tuple[torch.Tensor, torch.Tensor]
Spend = Callable[[int], None]  # told how many gradients or queries of one image were taken
PRECISIONS = ("bf16", "fp32")
PEERS = ("torchattacks", "foolbox", "ART", "one by one")
LEAST_ROBUST = 20.0  # percent: on a model that every attack breaks, comparisons are empty


@dataclass(frozen=True)
class Contender:
    """`start(model, spend)` makes the attack of one library: images and labels to adversarial images."""

    name: str
    start: Callable[[Classifier, Spend], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
    frozen: bool = False  # whether the weights are told to need no gradients, which no library's manual asks for
    attacks: bool = True  # whether what it returns is to be judged


# The field


def pgd_field(*, epsilon: float, steps: int, step_size: float, **_) -> list[Contender]:
    """PGD with the same radius, steps, step size and uniform random start by everybody."""
    ball = {"epsilon": epsilon, "steps": steps, "step_size": step_size}
    return [
        *(Contender(f"classwise {p}", _ours(pgd, p, ball)) for p in PRECISIONS),
        *(Contender(f"classwise {p}, any", _ours(pgd, p, {**ball, "protocol": "any"})) for p in PRECISIONS),
        Contender("torchattacks", partial(_torchattacks, **ball)),
        Contender("foolbox", partial(_foolbox, **ball)),
        Contender("foolbox, frozen weights", partial(_foolbox, **ball), frozen=True),
        Contender("ART", partial(_art, **ball)),
        Contender("ART, frozen weights", partial(_art, **ball), frozen=True),
        *(Contender(f"limit {p}", partial(_limit, precision=p, steps=steps), attacks=False) for p in PRECISIONS),
    ]


def cw_linf_field(**keys) -> list[Contender]:
    """All images side by side, against one image at a time, ours and ART's (the only library that has the attack)."""
    return [
        *(Contender(f"classwise {p}", _ours(cw_linf, p, keys)) for p in PRECISIONS),
        Contender("one by one", _one_by_one(cw_linf, keys)),
        Contender("ART", partial(_art_carlini, c=keys["c"], iterations=keys["iterations"], lr=keys["lr"])),
    ]


def nattack_field(**keys) -> list[Contender]:
    """No library has it: all images side by side, against one image at a time."""
    return [
        *(Contender(f"classwise {p}", _ours(nattack, p, keys)) for p in PRECISIONS),
        Contender("one by one", _one_by_one(nattack, keys)),
    ]


def _ours(attack: Callable, precision: str, keys: Mapping[str, Any]):
    """One of our attacks, as `evaluation.evaluate` runs it."""

    def start(model: Classifier, spend: Spend):
        fast = prepared(model, precision)
        return lambda x, y: _attacked(attack, model, fast, x, y, keys, spend)

    return start


def _one_by_one(attack: Callable, keys: Mapping[str, Any]):
    """The same attack as a plain loop over the images, on the model as it is."""

    def start(model: Classifier, spend: Spend):
        def run(x, y):
            singles = zip(x.split(1), y.split(1), strict=True)
            return torch.cat([_attacked(attack, model, model, a, b, keys, spend) for a, b in singles])

        return run

    return start


def _attacked(attack, model, fast, x, y, keys, spend: Spend) -> torch.Tensor:
    target = Target(model, fast, len(x), x.device)
    found = attack(target, x, y, **keys, generator=torch.Generator(x.device).manual_seed(0))
    spend(int(target.steps.sum()))
    return found


def _torchattacks(model, spend: Spend, *, epsilon, steps, step_size):
    import torchattacks

    attack = torchattacks.PGD(model, eps=epsilon, alpha=step_size, steps=steps, random_start=True)

    def run(x, y):
        spend(steps * len(x))
        return attack(x, y)

    return run


def _foolbox(model, spend: Spend, *, epsilon, steps, step_size):
    import foolbox

    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=next(model.parameters()).device)
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step_size, steps=steps, random_start=True)

    def run(x, y):
        spend(steps * len(x))
        return attack(wrapped, x, y, epsilons=epsilon)[1]

    return run


def _art(model, spend: Spend, *, epsilon, steps, step_size):
    from art.attacks.evasion import ProjectedGradientDescent

    def run(x, y):
        spend(steps * len(x))
        attack = ProjectedGradientDescent(
            _art_classifier(model, x),
            eps=epsilon,
            eps_step=step_size,
            max_iter=steps,
            num_random_init=1,
            batch_size=len(x),
            verbose=False,
        )
        return _through_numpy(attack, x, y)

    return run


def _art_carlini(model, spend: Spend, *, c: float, iterations: int, lr: float):
    from art.attacks.evasion import CarliniLInfMethod

    def run(x, y):
        attack = CarliniLInfMethod(
            _art_classifier(model, x),
            learning_rate=lr,
            max_iter=iterations,
            initial_const=c,
            largest_const=1.01 * c,  # one value of c, as ours in its first round
            verbose=False,
        )
        gradient = attack._loss_gradient

        def counted(*arguments):
            spend(1)
            return gradient(*arguments)

        attack._loss_gradient = counted
        return _through_numpy(attack, x, y)

    return run


def _art_classifier(model, x: torch.Tensor):
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(
        model,
        loss=torch.nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=len(model.classes),
        clip_values=(0.0, 1.0),
        device_type="gpu" if x.is_cuda else "cpu",
    )


def _through_numpy(attack, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)


def _limit(model, spend: Spend, *, precision: str, steps: int):
    """Bare forward and input-backward passes of the prepared model, one forward pass more, and nothing else."""
    fast = prepared(model, precision)

    def run(x, y):
        for _ in range(steps):
            point = x.clone().requires_grad_()
            logits = fast(point)
            torch.autograd.grad(logits, point, torch.ones_like(logits))
        with torch.no_grad():
            fast(x)
        spend(steps * len(x))
        return x

    return run


# The race


def run_race(field: Sequence[Contender], model: Classifier, batches: Sequence[Batch], repeats: int, report=print):
    """runs[contender, repeat]: seconds, gradients or queries, additional memory, and accuracy under attack.

    Contenders run in turn, so that a machine that slows down slows everybody down. Those with frozen weights run once:
    nothing is compared with them.
    """
    rows, first = [], [part[:1] for part in batches[0]]
    for contender in field:
        contender.start(model, lambda count: None)(*first)  # imports and first calls are nobody's cost
    for repeat in range(repeats):
        for contender in field:
            if contender.frozen and repeat:
                continue
            model.requires_grad_(not contender.frozen)
            rows.append({"contender": contender.name, "repeat": repeat, **_run(contender, model, batches)})
            report("{contender}, run {repeat}: {seconds:.1f} s".format(**rows[-1]))
    model.requires_grad_(False)
    return pd.DataFrame(rows)


def _run(contender: Contender, model: Classifier, batches: Sequence[Batch]) -> dict[str, float]:
    spent, right, device = 0, 0, batches[0][0].device

    def spend(count: int) -> None:
        nonlocal spent
        spent += count

    before, most = memory_mb(device), most_memory_mb(device)
    _wait(device)
    started = time.perf_counter()
    attack = contender.start(model, spend)
    for x, y in batches:
        found = attack(x, y)
        if contender.attacks:
            with torch.no_grad():
                right += int((model(found).argmax(dim=1) == y).sum())
    _wait(device)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "spent": spent,
        "memory_mb": most() - before,
        "accuracy": 100 * right / sum(len(y) for _, y in batches) if contender.attacks else float("nan"),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def standings(runs: pd.DataFrame, images: int, per_spent: bool = False) -> pd.DataFrame:
    """One row a contender: medians over repeats; a ratio is the median of the ratios within a repeat.

    `faster_than_X` is X's time in units of the contender's own: above 1, the contender is the faster one. With
    `per_spent` both are times of one gradient or query, for attacks that decide themselves how many they take.
    """
    table = runs.groupby("contender", sort=False).agg(
        seconds=("seconds", "median"),
        seconds_least=("seconds", "min"),
        seconds_most=("seconds", "max"),
        spent=("spent", "median"),
        memory_mb=("memory_mb", "max"),
        accuracy=("accuracy", "median"),
        repeats=("repeat", "size"),
    )
    table["spent_per_second"] = table["spent"] / table["seconds"]
    table["spent_per_image"] = table.pop("spent") / images
    for column in ("seconds", "seconds_least", "seconds_most"):
        table[f"{column}_per_1000"] = 1000 * table.pop(column) / images
    cost = runs.assign(cost=runs["seconds"] / runs["spent"] if per_spent else runs["seconds"])
    times = cost.pivot(index="repeat", columns="contender", values="cost")[table.index]
    for peer in PEERS:
        table[f"faster_than_{peer}"] = _ratio(times, peer) if peer in times else float("nan")
    limits = {p: _ratio(times, f"limit {p}") for p in PRECISIONS if f"limit {p}" in times}
    table["share_of_limit"] = [
        limits[who.split()[1]][who] if who.startswith("classwise") and limits and "any" not in who else float("nan")
        for who in table.index
    ]
    return table.reset_index()


def _ratio(times: pd.DataFrame, peer: str) -> pd.Series:
    return times.rdiv(times[peer], axis=0).median()


def check_robust(standing: pd.DataFrame, name: str) -> None:
    """Stop where the model is not robust: every attack would look equally strong."""
    least = standing["accuracy"].min()
    if least < LEAST_ROBUST:
        raise UserError(
            f"the bench model {name} survives the attack on {least:.1f} % of the images only; attacks cannot be "
            f"compared below {LEAST_ROBUST:g} %: train it longer (config/studies/bench.yaml)"
        )


@dataclass(frozen=True)
class Race:
    """How one kind of attack is raced."""

    field: Callable[..., list[Contender]]
    per_spent: bool
    unit: str


RACES = {
    "pgd": Race(pgd_field, per_spent=False, unit="gradients"),
    "cw-linf": Race(cw_linf_field, per_spent=True, unit="gradients"),
    "nattack": Race(nattack_field, per_spent=False, unit="queries"),
}


def raced(model: Classifier, images: Sequence[Batch], attack: Mapping[str, Any], repeats: int, name: str, report=print):
    """The standings of one attack (`{kind, **keys}`) on one model, with the unit of what is spent."""
    keys = dict(attack)
    race = RACES[keys.pop("kind")]
    runs = run_race(race.field(**keys), model, images, repeats, report)
    table = standings(runs, sum(len(y) for _, y in images), race.per_spent)
    if attack["kind"] == "pgd":
        check_robust(table, name)
    return table.assign(unit=race.unit)


# The table


def markdown(table: pd.DataFrame, machine: str) -> str:
    """The standings of all races as one Markdown table, for people."""
    header = ["model", "attack", "who", "s / 1,000 images", *(f"x {peer}" for peer in PEERS), "of limit"]
    header += ["spent / image", "spent / s", "MB", "survive %"]
    rule = ["---"] * 3 + ["---:"] * (len(header) - 3)
    lines = [_line(row) for _, row in table.iterrows()]
    body = "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))
    images = ", ".join(
        f"{n} for {attack}" for attack, n in table.groupby("attack", sort=False)["images"].first().items()
    )
    return f"""{body}

Medians of {table["repeats"].max()} runs in turn (frozen weights: one), least and most in brackets, scaled to 1,000
images (run: {images}).
{machine}

x peer: how many times faster than that peer, run by run; for cw-linf by the time of one gradient, as everybody takes
a different number of them. Frozen weights: the peer is spared the gradients of the weights, which its manual does not
mention. Of limit: the time of bare forward and input-backward passes of the prepared model, in units of the attack's.

Spent: gradients (pgd, cw-linf) or queries (nattack). MB: memory held beyond that before the run. Survive: images still
classified correctly by the float32 model.
"""


def _line(row: pd.Series) -> list[str]:
    times = [row[f"{column}_per_1000"] for column in ("seconds", "seconds_least", "seconds_most")]
    return [
        f"{row['dataset']} {row['arch']}",
        row["attack"],
        row["contender"],
        "{} [{}, {}]".format(*(f"{t:,.0f}" if t >= 100 else f"{t:.3g}" for t in times)),
        *(_number(row[f"faster_than_{peer}"], ".2f") for peer in PEERS),
        _number(100 * row["share_of_limit"], ".0f", " %"),
        _number(row["spent_per_image"], ",.1f"),
        _number(row["spent_per_second"], ",.0f"),
        _number(row["memory_mb"], ",.0f"),
        _number(row["accuracy"], ".1f"),
    ]


def _number(value: float, form: str, unit: str = "") -> str:
    return "" if pd.isna(value) else f"{value:{form}}{unit}"
