# The study behind all rules: paths, wildcards, and what each job needs. No rules in here.
import os
import re
import sys
from pathlib import Path

WORKFLOW = Path(workflow.basedir)
# Jobs import the library from this checkout, whatever environment Snakemake puts them into.
LIBRARY = str(WORKFLOW.parent / "src")
sys.path.insert(0, LIBRARY)
os.environ.update(PYTHONPATH=os.pathsep.join([LIBRARY, *filter(None, [os.getenv("PYTHONPATH")])]))

from classwise.errors import ConfigError
from classwise.sources import source_fingerprint
from classwise.study import load_config, load_study

try:
    CONFIG = load_config(config)
    STUDY = load_study(CONFIG, Path("config/studies"))
except ConfigError as error:
    # Not an exception of Snakemake's: it would add places in this file, where nothing is wrong.
    sys.exit(str(error))

ENVIRONMENT = "../../environment.yml"
RESULTS = f"results/{STUDY.name}"
DATA = f"{RESULTS}/data/{{dataset}}"
MODEL = "{dataset}/{arch}/{defense}/{removed}/{seed}"
OUTCOMES = f"{RESULTS}/outcomes/{MODEL}/{{view}}/{{attack}}.parquet"


def surrogate(file):
    """An input function: that file of the model on which a transfer attack climbs; nothing for other attacks."""

    def files(wildcards):
        defense = STUDY.surrogate(wildcards.attack, wildcards.dataset, wildcards.defense)
        names = {**wildcards, "defense": defense}
        return [f"{RESULTS}/models/{MODEL}/{file}".format(**names)] if defense else []

    return files


def one_of(names):
    """A pattern for a wildcard that is one of these names; nothing fits an empty list."""
    return "|".join(map(re.escape, names)) or r"(?!)"


wildcard_constraints:
    dataset=one_of(STUDY.file.datasets),
    arch=one_of(STUDY.file.architectures),
    defense=one_of(STUDY.file.defenses),
    removed=one_of(["all", *(f"no-{j}" for j in range(max(STUDY.class_counts.values())))]),
    seed=r"0|[1-9]\d*",
    view=one_of(["test", *STUDY.file.views]),


def source(script, modules=lambda wildcards: [], files=()):
    """A params function: the fingerprint of a script, the modules a job picks by name, and all they import."""
    path = WORKFLOW / "scripts" / script
    return lambda wildcards: source_fingerprint(path, modules(wildcards), files)


def outcomes_file(outcome):
    model = outcome.model
    view = STUDY.view(outcome.attack, model.dataset, model.defense)
    return OUTCOMES.format(**model._asdict(), view=view, attack=outcome.attack)


def needs(name):
    """An input function: the files that an artefact of the study is built from."""

    def files(wildcards):
        try:
            artefact = STUDY.artefact(name)
        except ConfigError as error:
            # As the name of a missing file it is shown as it stands; an exception would come with a traceback.
            return {"cards": [str(error)]}
        outcomes = artefact.outcomes(artefact.seeds, STUDY.class_counts)
        histories = artefact.histories(artefact.seeds)
        models = [model._asdict() for model in artefact.models(artefact.seeds)]
        return {
            "cards": sorted({f"{RESULTS}/data/{dataset}/data.json" for dataset in artefact.datasets()}),
            # once each, also where an artefact names them twice
            "outcomes": list(dict.fromkeys(outcomes_file(o) for o in outcomes)),
            "histories": list(
                dict.fromkeys(f"{RESULTS}/models/{MODEL}/history.parquet".format(**m._asdict()) for m in histories)
            ),
            "arrays": sorted({f"{DATA}/data.safetensors".format(**model) for model in models}),
            "weights": sorted({f"{RESULTS}/models/{MODEL}/model.safetensors".format(**model) for model in models}),
            "models": sorted({f"{RESULTS}/models/{MODEL}/model.json".format(**model) for model in models}),
        }

    return files


def artefact_block(name):
    """A params function: the keys of an artefact's block, defaults filled in."""
    return lambda wildcards: STUDY.artefact(name).plain()


def races(wildcards):
    """What is timed: the study's rows, each with the keys of the attack that it names."""
    rows = STUDY.artefact("bench_attacks").plain()["rows"]
    return [{**row, "keys": STUDY.method(row["attack"], row["dataset"], row["defense"])} for row in rows]


def caption(name):
    return f"../report/{name}.rst"


def artefact_files(name):
    """All that an artefact consists of, for the page."""
    return list(map(str, getattr(rules, name).output))
