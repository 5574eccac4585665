"""A study file, read, checked and resolved: what each job of the workflow is to do, as plain values.

Everything here runs while Snakemake plans, without torch. Errors are collected and told all at once, each in one
sentence with file, key, value and what is allowed.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from classwise.artefacts import ARTEFACTS, BENCHED, Artefact, Model, Table5
from classwise.attacks import ATTACKS, DEAR
from classwise.data import DATASETS
from classwise.data.dataset import Source
from classwise.defenses import DEFENSES
from classwise.deferred import defer
from classwise.errors import ConfigError, choices
from classwise.models import ARCHITECTURES
from classwise.parameters import (
    ONE_FOR_EACH_CLASS,
    Count,
    Flag,
    Id,
    Natural,
    Number,
    Parameters,
    Positive,
    parameters_of,
)
from classwise.registry import Registry
from classwise.specs import AtEpoch, Best, Training

defer("torch")


class Config(Parameters):
    """config/config.yaml: which study, and what belongs to the machine rather than to a study."""

    study: Id = "digits"
    data_root: Annotated[str, Field(strict=True, min_length=1)] = "data"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_epochs: Annotated[Count, Field(description="a training is saved after so many epochs")] = 1
    checkpoint_minutes: Annotated[Positive, Field(description="or after so many minutes, if that is sooner")] = 10


class When(Parameters):
    """Which models an override is about; at least one of the two."""

    dataset: Id | None = None
    defense: Id | None = None


class View(Parameters):
    """A part of the test set: `per_class` images of each class, chosen by `seed`."""

    per_class: Count
    seed: Natural = 0


class StudyFile(Parameters):
    """The outer shape of a study file; blocks with a `kind` are checked against the method they name."""

    title: Annotated[str, Field(strict=True, min_length=1)]
    description: Annotated[str, Field(strict=True)] = ""
    seeds: Annotated[list[Natural], Field(strict=True, min_length=1)]
    datasets: Annotated[dict[Id, dict[str, Any]], Field(min_length=1)]
    architectures: Annotated[dict[Id, dict[str, Any]], Field(min_length=1)]
    training: dict[str, Any]
    defenses: Annotated[dict[Id, dict[str, Any]], Field(min_length=1)]
    attacks: Annotated[dict[Id, dict[str, Any]], Field(min_length=1)]
    views: Annotated[dict[Id, View], Field(default_factory=dict)]
    artefacts: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


class ArchitectureKeys(Parameters):
    """The keys that every architecture has beside its own."""

    mean: list[Number] | None = None
    std: list[Positive] | None = None


def _batch_size(value: object) -> object:
    # Said here in one sentence; the union would report each of its branches.
    if value != "auto" and not (type(value) is int and 1 <= value <= 10**9):
        raise PydanticCustomError("batch_size", "must be a count such as 256, or `auto`")
    return value


class AttackKeys(Parameters):
    """The keys that every attack has beside its own."""

    batch_size: Annotated[
        Count | Literal["auto"],
        BeforeValidator(_batch_size),
        Field(description="images attacked at once; auto: the most that fit into memory"),
    ] = "auto"
    precision: Annotated[
        Literal["fp32", "bf16"], Field(description="of the climb; who is fooled is always decided in fp32")
    ] = "fp32"
    compile: Annotated[Flag, Field(description="torch.compile the prepared model")] = False
    view: Annotated[Id, Field(description="`test`, or an id of `views`")] = "test"


def dataset_parameters(kind: str) -> type[Parameters]:
    return parameters_of(DATASETS[kind].load)


@functools.cache
def architecture_parameters(kind: str) -> type[Parameters]:
    return _joined(kind, ARCHITECTURES.parameters(kind), ArchitectureKeys)


def defense_parameters(kind: str) -> type[Parameters]:
    return parameters_of(DEFENSES[kind])


@functools.cache
def attack_parameters(kind: str) -> type[Parameters]:
    return _joined(kind, parameters_of(ATTACKS[kind]), AttackKeys)


def _joined(name: str, *groups: type[Parameters]) -> type[Parameters]:
    return create_model(name, __base__=groups)


# The sections whose blocks each name a method by its `kind`.
SECTIONS: dict[str, tuple[Registry, Callable[[str], type[Parameters]]]] = {
    "datasets": (DATASETS, dataset_parameters),
    "architectures": (ARCHITECTURES, architecture_parameters),
    "defenses": (DEFENSES, defense_parameters),
    "attacks": (ATTACKS, attack_parameters),
}


class Study:
    """A checked study. Methods give jobs their parameters as plain values with every default filled in."""

    def __init__(self, path: Path, text: str | None = None):
        self.path, self.name = Path(path), Path(path).stem
        checker = _Checker(str(path))
        content = checker.read(path if text is None else text)
        self.file = checker.validate(StudyFile, content, ())
        checker.stop()
        self.raw = content
        self._check(checker)
        checker.stop()

    @property
    def seeds(self) -> list[int]:
        return list(self.file.seeds)

    def source(self, dataset: str) -> Source:
        return DATASETS[self.file.datasets[dataset]["kind"]]

    @property
    def class_counts(self) -> dict[str, int]:
        return {name: len(self.source(name).classes) for name in self.file.datasets}

    # What jobs do

    def dataset(self, dataset: str) -> dict[str, Any]:
        return _resolved(self.file.datasets[dataset], dataset_parameters)

    def architecture(self, arch: str) -> dict[str, Any]:
        return _resolved(self.file.architectures[arch], architecture_parameters)

    def attack(self, attack: str, dataset: str, defense: str) -> dict[str, Any]:
        block = _overridden(self.file.attacks[attack], dataset, defense)
        return _resolved(block, attack_parameters)

    def method(self, attack: str, dataset: str, defense: str) -> dict[str, Any]:
        """The attack without the keys that every attack has: what decides who is fooled, not how it is computed."""
        block = self.attack(attack, dataset, defense)
        return {name: value for name, value in block.items() if name not in AttackKeys.model_fields}

    def defense(self, defense: str, dataset: str) -> dict[str, Any]:
        block = _overridden(self.file.defenses[defense], dataset, defense)
        block.pop("training", None)
        return _resolved(block, defense_parameters)

    def training(self, defense: str, dataset: str) -> Training:
        common = _overridden(self.file.training, dataset, defense)
        own = _overridden(self.file.defenses[defense], dataset, defense).get("training", {})
        return Training.model_validate(_merged(common, own))

    def train_job(self, dataset: str, arch: str, defense: str) -> dict[str, Any]:
        """All that decides a training apart from data, seed and removed class."""
        training = self.training(defense, dataset)
        evaluation = self.method(training.evaluate, dataset, defense) if training.evaluate else None
        settings = self.defense(defense, dataset)
        return {
            "architecture": {**self.architecture(arch), "head": DEFENSES[settings["kind"]].head},
            "defense": settings,
            # the attack itself, not its id, is what the job uses
            "training": {**training.plain(), "evaluate": None},
            "evaluation": evaluation,
        }

    def view(self, attack: str, dataset: str, defense: str) -> str:
        return self.attack(attack, dataset, defense)["view"]

    def surrogate(self, attack: str, dataset: str, defense: str) -> str | None:
        """The defense whose model a transfer attack climbs on."""
        return self.attack(attack, dataset, defense).get("surrogate")

    @property
    def dear_attacks(self) -> list[str]:
        return [name for name, block in self.file.attacks.items() if block["kind"] in DEAR]

    @property
    def cheap_attacks(self) -> list[str]:
        return [name for name in self.file.attacks if name not in self.dear_attacks]

    def train_modules(self, dataset: str, arch: str, defense: str) -> list[str]:
        """The modules that hold the methods of a training, for its source fingerprint."""
        job = self.train_job(dataset, arch, defense)
        return [
            ARCHITECTURES.module(job["architecture"]["kind"]),
            DEFENSES.module(job["defense"]["kind"]),
            ATTACKS.module((job["evaluation"] or {"kind": "none"})["kind"]),
        ]

    def attack_modules(self, dataset: str, arch: str, defense: str, attack: str) -> list[str]:
        return [
            ARCHITECTURES.module(self.architecture(arch)["kind"]),
            ATTACKS.module(self.attack(attack, dataset, defense)["kind"]),
        ]

    def dataset_modules(self, dataset: str) -> list[str]:
        return [DATASETS.module(self.dataset(dataset)["kind"])]

    # What is built

    @property
    def artefacts(self) -> list[str]:
        """Names, in the order of the page."""
        return [name for name in ARTEFACTS if name in self.file.artefacts]

    def artefact(self, name: str) -> Artefact:
        if name not in self.file.artefacts:
            raise ConfigError([f"{self.path}: artefacts: this study does not build {name}; add a block with that name"])
        keys = ARTEFACTS[name].model_validate(self.file.artefacts[name])
        return keys.model_copy(update={"seeds": keys.seeds or self.seeds})

    def resolved(self) -> dict[str, Any]:
        """The study as it was understood, for the provenance beside the results."""
        return {
            "study": self.name,
            **self.file.plain(),
            **{
                section: {
                    name: _with_defaults(block, parameters) for name, block in getattr(self.file, section).items()
                }
                for section, (_, parameters) in SECTIONS.items()
            },
        }

    # Checks

    def _check(self, checker: "_Checker") -> None:
        sections = {section: list(getattr(self.file, section)) for section in SECTIONS}
        checker.unique(self.file.seeds, ("seeds",))
        for section, (registry, parameters) in SECTIONS.items():
            for name, block in getattr(self.file, section).items():
                self._check_block(checker, (section, name), block, registry, parameters, sections)
        for block, key in self._variants(checker, self.file.training, ("training",), sections):
            self._check_training(checker, block, key, sections)
        if not checker.problems:
            self._check_artefacts(checker, sections)

    def _check_block(self, checker, key, block, registry: Registry, parameters, sections) -> None:
        """One method's block, as it stands and with each of its overrides."""
        kind = block.get("kind")
        if not checker.known(kind, registry, (*key, "kind")):
            return
        overridable = key[0] in ("defenses", "attacks")
        variants = self._variants(checker, block, key, sections) if overridable else [(block, key)]
        for variant, place in variants:
            keys = {name: value for name, value in variant.items() if name != "kind"}
            if "kind" in variant and variant["kind"] != kind:
                checker.say((*place, "kind"), variant["kind"], "an override cannot change the kind")
            if key[0] == "defenses" and "training" in keys:
                self._check_training(checker, keys.pop("training"), (*place, "training"), sections, self.file.training)
            extra = ["kind", "overrides", "training"] if key[0] == "defenses" else ["kind", "overrides"]
            checked = checker.validate(parameters(kind), keys, place, extra=extra if overridable else ["kind"])
            if key[0] == "attacks" and checked is not None:
                self._check_references(checker, checked, place, sections)
            if key[0] == "architectures":
                self._check_channels(checker, place, keys)

    def _check_references(self, checker, attack: Parameters, place, sections) -> None:
        """What an attack names elsewhere in the study."""
        checker.known(attack.view, ["test", *self.file.views], (*place, "view"), noun="view of this study")
        surrogate = getattr(attack, "surrogate", None)
        if surrogate is not None:
            checker.known(surrogate, sections["defenses"], (*place, "surrogate"), noun="defense of this study")

    def _check_channels(self, checker, place, keys) -> None:
        lengths = {len(keys[name]) for name in ("mean", "std") if isinstance(keys.get(name), list)}
        if len(lengths) > 1 or lengths - {1, 3}:
            checker.say(place, f"mean and std of lengths {sorted(lengths)}", "must have one number for each channel")

    def _check_training(self, checker, block, key, sections, common: Mapping[str, Any] | None = None) -> None:
        if not isinstance(block, dict):
            checker.say(key, block, "must be a mapping of keys")
            return
        whole = _merged({k: v for k, v in (common or {}).items() if k != "overrides"}, block)
        training = checker.validate(Training, whole, key, extra=[] if common else ["overrides"])
        if training is None:
            return
        if training.evaluate is not None and checker.known(
            training.evaluate, sections["attacks"], (*key, "evaluate"), noun="attack of this study"
        ):
            kind = self.file.attacks[training.evaluate].get("kind")
            if kind == "transfer":
                checker.say((*key, "evaluate"), training.evaluate, "must not be a transfer attack: it needs two models")
        if isinstance(training.select, Best) and training.select.best != "natural" and training.evaluate is None:
            fix = "needs `evaluate`, an attack that measures the robust accuracy"
            checker.say((*key, "select", "best"), training.select.best, fix)
        if isinstance(training.select, AtEpoch) and training.select.epoch > training.epochs:
            checker.say(
                (*key, "select", "epoch"),
                training.select.epoch,
                f"must be at most epochs = {training.epochs}",
            )

    def _variants(self, checker, block, key, sections) -> Iterator[tuple[dict[str, Any], tuple]]:
        """The block itself and, for each entry of its `overrides`, the block with that entry laid over it."""
        base = {name: value for name, value in block.items() if name != "overrides"}
        yield base, key
        overrides = block.get("overrides", [])
        if not isinstance(overrides, list):
            checker.say((*key, "overrides"), overrides, "must be a list of {when: {dataset: ..., defense: ...}, ...}")
            return
        for number, override in enumerate(overrides):
            place = (*key, "overrides", number)
            when = override.get("when") if isinstance(override, dict) else None
            if not isinstance(when, dict) or not when:
                checker.say(place, override, "must have a key `when: {dataset: ..., defense: ...}` with one or both")
                continue
            checked = checker.validate(When, when, (*place, "when"))
            if checked is None:
                continue
            for name, section in (("dataset", "datasets"), ("defense", "defenses")):
                if name in when:
                    checker.known(when[name], sections[section], (*place, "when", name), noun=f"{name} of this study")
            yield _merged(base, {name: value for name, value in override.items() if name != "when"}), place

    def _check_artefacts(self, checker, sections) -> None:
        for name, block in self.file.artefacts.items():
            key = ("artefacts", name)
            if not checker.known(name, ARTEFACTS, ("artefacts",), noun="artefact"):
                continue
            artefact = checker.validate(ARTEFACTS[name], block, key, context=sections)
            if artefact is None:
                continue
            checker.unique(artefact.seeds or [], (*key, "seeds"))
            for number, row in enumerate(getattr(artefact, "rows", [])):
                column, kinds = ("natural", ("none",)) if isinstance(artefact, Table5) else ("attack", BENCHED)
                attack = getattr(row, column)
                if self.file.attacks[attack]["kind"] not in kinds:
                    fix = f"must be an attack of kind {' or '.join(kinds)}"
                    checker.say((*key, "rows", number, column), attack, fix)
            removed = getattr(artefact, "removed", "each")
            if removed != "each":
                checker.unique(removed, (*key, "removed"))
                count = self.class_counts[artefact.dataset]
                for number, c in enumerate(removed):
                    if c >= count:
                        fix = f"{artefact.dataset} has no such class; allowed: 0 to {count - 1}, or `each`"
                        checker.say((*key, "removed", number), c, fix)
            for model in _models(artefact, self.seeds, self.class_counts):
                self._check_model(checker, model, key)
            for model in artefact.histories(self.seeds[:1]):
                if self.training(model.defense, model.dataset).evaluate is None:
                    fix = f"{name} shows the robust accuracies of its history, so name an attack here"
                    checker.say(("training", "evaluate"), None, fix)

    def _check_model(self, checker, model: Model, key) -> None:
        """What only shows when data set, architecture, defense and all overrides come together."""
        training = self.training(model.defense, model.dataset)
        if isinstance(training.select, AtEpoch) and training.select.epoch > training.epochs:
            fix = f"must be at most {training.epochs}, the epochs of {model.defense} on {model.dataset}"
            checker.say(("training", "select", "epoch"), training.select.epoch, fix)
        self._check_one_for_each_class(checker, model)
        channels, *sides = self.source(model.dataset).shape
        kind = self.file.architectures[model.arch]["kind"]
        if min(sides) < ARCHITECTURES.smallest[kind]:
            least = ARCHITECTURES.smallest[kind]
            fix = f"needs images of at least {least} x {least} pixels; {model.dataset}, for {key[-1]}, has {sides}"
            checker.say(("architectures", model.arch, "kind"), kind, fix)
        for name in ("mean", "std"):
            values = self.file.architectures[model.arch].get(name)
            if values is not None and len(values) != channels:
                fix = f"{model.dataset}, which {key[-1]} trains it on, has {channels} channel(s)"
                checker.say(("architectures", model.arch, name), values, fix)

    def _check_one_for_each_class(self, checker, model: Model) -> None:
        count, settings = self.class_counts[model.dataset], self.defense(model.defense, model.dataset)
        for name, field in defense_parameters(settings["kind"]).model_fields.items():
            value = settings[name]
            if ONE_FOR_EACH_CLASS in field.metadata and isinstance(value, list) and len(value) != count:
                fix = f"must be one number, or one for each of the {count} classes of {model.dataset}"
                checker.say(("defenses", model.defense, name), value, f"{fix}; these are {len(value)}")


def _models(artefact: Artefact, seeds: list[int], class_counts: dict[str, int]) -> set[Model]:
    outcomes = artefact.outcomes(seeds, class_counts)
    return {outcome.model for outcome in outcomes} | set(artefact.histories(seeds)) | set(artefact.models(seeds))


def load_config(values: Mapping[str, Any], path: str = "config/config.yaml") -> Config:
    """What Snakemake read from config.yaml and `--config`, checked."""
    checker = _Checker(path)
    config = checker.validate(Config, dict(values), ())
    checker.stop()
    return config


def load_study(config: Config, folder: Path) -> Study:
    """The study that the configuration names."""
    path = folder / f"{config.study}.yaml"
    if not path.exists():
        there = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ConfigError(
            [f"config/config.yaml: study = {config.study!r}: no file {path}; {choices(config.study, there)}"]
        )
    return Study(path)


def _with_defaults(block: Mapping[str, Any], parameters) -> dict[str, Any]:
    """A block as written, plus the defaults of its method."""
    own = {name: value for name, value in block.items() if name not in ("training", "overrides")}
    return {**block, **_resolved(own, parameters)}


def _resolved(block: Mapping[str, Any], parameters) -> dict[str, Any]:
    keys = {name: value for name, value in block.items() if name not in ("kind", "overrides")}
    return {"kind": block["kind"], **parameters(block["kind"]).model_validate(keys).plain()}


def _overridden(block: Mapping[str, Any], dataset: str, defense: str) -> dict[str, Any]:
    """The block with every override that fits laid over it, later ones on top."""
    here, result = (
        {"dataset": dataset, "defense": defense},
        {k: v for k, v in block.items() if k != "overrides"},
    )
    for override in block.get("overrides", []):
        if all(here[name] == value for name, value in override["when"].items()):
            result = _merged(result, {name: value for name, value in override.items() if name != "when"})
    return result


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`patch` over `base`; mappings inside are merged key by key unless the kind changes, all else is replaced."""
    result = dict(base)
    for name, value in patch.items():
        old = result.get(name)
        merge = isinstance(value, Mapping) and isinstance(old, Mapping) and value.get("kind") in (None, old.get("kind"))
        result[name] = _merged(old, value) if merge else value
    return result


class _Checker:
    """Collects what is wrong with one file."""

    def __init__(self, file: str):
        self.file, self.problems = file, []

    def say(self, key: tuple, value: object, fix: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        place = _dotted(key)
        sentence = f"{self.file}: {place} = {shown}: {fix}" if place else f"{self.file}: {fix}"
        if sentence not in self.problems:
            self.problems.append(sentence)

    def stop(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)

    def read(self, source: Path | str) -> dict[str, Any]:
        try:
            text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
            content = yaml.load(text, _UniqueKeys)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{self.file}: cannot be read ({error})"]) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            told = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError([f"{self.file}: not valid YAML: {told}"]) from error
        if not isinstance(content, dict):
            raise ConfigError([f"{self.file}: must be a mapping with the keys {', '.join(StudyFile.model_fields)}"])
        return content

    def known(self, value: object, allowed, key: tuple, noun: str | None = None) -> bool:
        if isinstance(value, str) and value in allowed:
            return True
        noun = noun or getattr(allowed, "noun", "name")
        if value is None:
            self.say(key, value, f"an {noun} is needed" if noun[0] in "aeiou" else f"a {noun} is needed")
        else:
            self.say(key, value, f"unknown {noun}; {choices(value, allowed)}")
        return False

    def unique(self, values, key: tuple) -> None:
        twice = sorted({value for value in values if list(values).count(value) > 1})
        if twice:
            self.say(
                key,
                list(values),
                f"must be different from each other; {', '.join(map(str, twice))} is there twice",
            )

    def validate(self, model: type[Parameters], data: Any, key: tuple, extra=(), context=None):
        """An instance of `model`, or None with every problem noted. `extra` are keys allowed beside the model's."""
        try:
            return model.model_validate(data, context=context)
        except ValidationError as error:
            for problem in error.errors():
                self._explain(problem, model, key, extra)
            return None

    def _explain(self, problem: Mapping[str, Any], model: type[Parameters], key: tuple, extra) -> None:
        location = tuple(part for part in problem["loc"] if part != "[key]")
        *outer, last = location or ("",)
        place = (*key, *location)
        if problem["type"] == "missing":
            where = _dotted((*key, *outer))
            self.problems.append(f"{self.file}: {where + ': ' if where else ''}the key `{last}` is missing")
        elif problem["type"] == "extra_forbidden":
            allowed = [*_fields(model, outer), *(extra if not outer else [])]
            self.say(place, problem["input"], f"unknown key; {choices(last, allowed)}")
        else:
            self.say(place, problem["input"], _plain_words(problem))


def _plain_words(problem: Mapping[str, Any]) -> str:
    """What pydantic says, for readers of YAML rather than of Python."""
    if problem["type"] in ("dict_type", "model_type"):
        return "must be a mapping of keys"
    if problem["type"] == "list_type":
        return "must be a list"
    if problem["type"] == "too_short":
        return f"needs at least {problem['ctx']['min_length']} entry"
    told = problem["msg"].replace("Input should be", "must be")
    return told[0].lower() + told[1:]


def _dotted(key: tuple) -> str:
    """attacks.pgd20.epsilon; a part that could be misread is quoted."""
    return ".".join(str(part) if re.fullmatch(r"[\w-]+", str(part)) else repr(part) for part in key)


def _fields(model: type[Parameters], location) -> list[str]:
    """The keys allowed at `location` inside `model`."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            found = _inner_model(model.model_fields[part].annotation)
            if found is None:
                return []
            model = found
    return list(model.model_fields)


def _inner_model(annotation) -> type[Parameters] | None:
    if isinstance(annotation, type) and issubclass(annotation, Parameters):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _inner_model(part)
        if found is not None:
            return found
    return None


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key written twice, where the usual loader silently keeps the last."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result = {}
    for key_node, value_node in node.value:
        name = loader.construct_object(key_node, deep=True)
        if not isinstance(name, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is not a name", key_node.start_mark)
        if name in result:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is there twice", key_node.start_mark)
        result[name] = loader.construct_object(value_node, deep=True)
    return result


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
