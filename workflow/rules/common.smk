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


wildcard_constraints:
    dataset="|".join(map(re.escape, STUDY.file.datasets)),
    arch="|".join(map(re.escape, STUDY.file.architectures)),
    defense="|".join(map(re.escape, STUDY.file.defenses)),
    attack="|".join(map(re.escape, STUDY.file.attacks)),
    removed="|".join(["all", *(f"no-{j}" for j in range(max(STUDY.class_counts.values())))]),
    seed=r"0|[1-9]\d*",
    view="test",


def source(script, modules=lambda wildcards: [], files=()):
    """A params function: the fingerprint of a script, the modules a job picks by name, and all they import."""
    path = WORKFLOW / "scripts" / script
    return lambda wildcards: source_fingerprint(path, modules(wildcards), files)


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
        return {
            "cards": sorted({f"{RESULTS}/data/{dataset}/data.json" for dataset in artefact.datasets()}),
            "outcomes": [OUTCOMES.format(**o.model._asdict(), view=o.view, attack=o.attack) for o in outcomes],
            "histories": [f"{RESULTS}/models/{MODEL}/history.parquet".format(**m._asdict()) for m in histories],
        }

    return files


def artefact_block(name):
    """A params function: the keys of an artefact's block, defaults filled in."""
    return lambda wildcards: STUDY.artefact(name).plain()


def caption(name):
    return f"../report/{name}.rst"


def artefact_files(name):
    """All that an artefact consists of, for the page."""
    return list(map(str, getattr(rules, name).output))
