"""What a study can build, and what each artefact is built from.

An artefact's class holds the keys of its block under `artefacts:` in the study file, and names the models, histories
and outcomes that it needs. Nothing else decides what is trained and attacked.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from classwise.errors import choices
from classwise.parameters import Count, Natural, Parameters


class Model(NamedTuple):
    """One trained model of a study; `removed` is `all`, or `no-5` for one trained without class 5."""

    dataset: str
    arch: str
    defense: str
    removed: str
    seed: int


class Outcomes(NamedTuple):
    """One model under one attack, on the view of the test set that the attack names."""

    model: Model
    attack: str


def _reference(section: str, noun: str):
    def check(value: str, info: ValidationInfo) -> str:
        defined = (info.context or {}).get(section)
        if defined is not None and value not in defined:
            text = f"no such {noun} in this study; {choices(value, defined)}"
            raise PydanticCustomError("reference", "{text}", {"text": text})
        return value

    return Annotated[str, Field(strict=True), AfterValidator(check)]


DatasetId = _reference("datasets", "data set")
ArchId = _reference("architectures", "architecture")
DefenseId = _reference("defenses", "defense")
AttackId = _reference("attacks", "attack")
Some = Field(min_length=1)


def _different(values: list[str]) -> list[str]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise PydanticCustomError("twice", "{text}", {"text": f"{', '.join(twice)} is there twice"})
    return values


Different = AfterValidator(_different)


class Artefact(Parameters):
    """The keys that every artefact has."""

    seeds: Annotated[list[Natural] | None, Field(min_length=1, description="default: the study's seeds")] = None

    def outcomes(self, seeds: list[int], classes: dict[str, int]) -> Iterator[Outcomes]:
        """The outcomes it reads; `classes` maps a data set's id to its number of classes."""
        yield from ()

    def histories(self, seeds: list[int]) -> Iterator[Model]:
        """The models whose training history it reads."""
        yield from ()

    def models(self, seeds: list[int]) -> Iterator[Model]:
        """The models that it reads themselves, not their outcomes."""
        yield from ()

    def datasets(self) -> list[str]:
        return [self.dataset]


class Setting(Parameters):
    """One network on one data set under one defense."""

    dataset: DatasetId
    arch: ArchId
    defense: DefenseId


class AttackedSetting(Setting):
    attack: AttackId


class Table1(Artefact):
    dataset: DatasetId
    arch: ArchId
    defenses: Annotated[list[DefenseId], Some, Different]
    attacks: Annotated[list[AttackId], Some, Different]

    def outcomes(self, seeds, classes):
        for defense in self.defenses:
            for seed in seeds:
                model = Model(self.dataset, self.arch, defense, "all", seed)
                yield from (Outcomes(model, attack) for attack in self._attacks())

    def _attacks(self) -> list[str]:
        return self.attacks


class Table3(Table1):
    baseline: Annotated[AttackId, Field(description="the attack that differences are taken to: PGD, 1/T = 1")]

    def _attacks(self) -> list[str]:
        return [self.baseline, *self.attacks]


class Contrast(Parameters):
    """Standard against adversarial training on one data set."""

    dataset: DatasetId
    arch: ArchId
    standard: DefenseId
    natural: Annotated[AttackId, Field(description="the attack of kind `none`")]
    adversarial: DefenseId
    attack: AttackId


class Table5(Artefact):
    rows: Annotated[list[Contrast], Some]

    def outcomes(self, seeds, classes):
        for row in self.rows:
            for seed in seeds:
                yield Outcomes(Model(row.dataset, row.arch, row.standard, "all", seed), row.natural)
                yield Outcomes(Model(row.dataset, row.arch, row.adversarial, "all", seed), row.attack)

    def datasets(self):
        return [row.dataset for row in self.rows]


class Figure1(Artefact):
    panels: Annotated[list[Setting], Some]

    def histories(self, seeds):
        for panel in self.panels:
            for seed in seeds:
                yield Model(panel.dataset, panel.arch, panel.defense, "all", seed)

    def datasets(self):
        return [panel.dataset for panel in self.panels]


class Figure2(Artefact):
    panels: Annotated[list[AttackedSetting], Some]

    def outcomes(self, seeds, classes):
        for panel in self.panels:
            for seed in seeds:
                yield Outcomes(Model(panel.dataset, panel.arch, panel.defense, "all", seed), panel.attack)

    def datasets(self):
        return [panel.dataset for panel in self.panels]


def _removed(value: object) -> object:
    # Said here in one sentence; the union would report each of its branches.
    classes = value if isinstance(value, list) and value else [None]
    if value != "each" and not all(type(c) is int and c >= 0 for c in classes):
        raise PydanticCustomError("removed", "must be `each`, or a list of class ids such as [3, 5]")
    return value


class Figure4(Artefact):
    dataset: DatasetId
    arch: ArchId
    defense: DefenseId
    attack: AttackId
    removed: Annotated[
        Literal["each"] | list[Natural],
        BeforeValidator(_removed),
        Field(description="`each` class in turn, or a list of class ids"),
    ] = "each"

    def removed_classes(self, classes: dict[str, int]) -> list[int]:
        return list(range(classes[self.dataset])) if self.removed == "each" else list(self.removed)

    def outcomes(self, seeds, classes):
        for removed in ["all", *(f"no-{j}" for j in self.removed_classes(classes))]:
            for seed in seeds:
                yield Outcomes(Model(self.dataset, self.arch, self.defense, removed, seed), self.attack)


BENCHED = ("pgd", "cw-linf", "nattack")  # the kinds that `bench.py` can race


class Timed(AttackedSetting):
    """One attack on one model, by us and by others."""

    images: Annotated[Count, Field(description="test images attacked in each run; times are scaled to 1,000")]


class BenchAttacks(Artefact):
    rows: Annotated[list[Timed], Some]
    batch_size: Count = 128
    repeats: Annotated[Count, Field(description="of every contender, in turn; medians are told")] = 3

    def models(self, seeds):
        for row in self.rows:
            yield Model(row.dataset, row.arch, row.defense, "all", seeds[0])

    def datasets(self):
        return [row.dataset for row in self.rows]


# In the order of the page. The name is the Snakemake target, the function in `tables.py` or `plots.py`, and the
# caption in workflow/report/.
ARTEFACTS: dict[str, type[Artefact]] = {
    "tian21_table1": Table1,
    "tian21_table3": Table3,
    "tian21_table5": Table5,
    "tian21_figure1": Figure1,
    "tian21_figure2": Figure2,
    "tian21_figure4": Figure4,
    "bench_attacks": BenchAttacks,
}
