"""Files that say the same thing twice stay in step."""

import json
import re
import subprocess
import sys
import tomllib

import jsonschema
import pytest
import yaml

from classwise.artefacts import ARTEFACTS
from classwise.plots import FIGURES
from classwise.schema import SCHEMAS
from classwise.tables import TABLES
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch"}


def requirement(text: str) -> tuple[str, str]:
    name, rest = re.fullmatch(r"([A-Za-z0-9_.-]+(?:\[\w+\])?)(.*)", text.strip()).groups()
    return name, rest


def test_environment_yml_has_the_same_requirements_as_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in environment if isinstance(entry, dict))
    found = dict(map(requirement, [entry for entry in environment if isinstance(entry, str)] + pip))
    assert found.pop("python").lstrip("=") == PROJECT["requires-python"].lstrip(">=")
    found.pop("pip")
    wanted = dict(map(requirement, PROJECT["dependencies"]))
    assert found == {CONDA_NAMES.get(name, name): version for name, version in wanted.items()}


def test_the_lock_names_one_exact_version_of_everything_that_is_installed_by_name():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(line.split("==") for line in lines)
    assert len(locked) == len(lines)
    names = {name.lower().replace("_", "-") for name in locked}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]:
        name, _ = requirement(text)
        assert name.partition("[")[0].lower() in names
    assert locked["torch"] == "2.13.0"


@pytest.mark.parametrize("file", list(SCHEMAS))
def test_schemas_are_in_step_with_the_code(file):
    stored = json.loads((ROOT / "workflow" / "schemas" / file).read_text())
    assert stored == json.loads(json.dumps(SCHEMAS[file]())), "run `make schemas`"
    jsonschema.Draft202012Validator.check_schema(stored)


@pytest.mark.parametrize("file", sorted((ROOT / "config" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_fit_the_schema(file):
    schema = json.loads((ROOT / "workflow" / "schemas" / "study.schema.json").read_text())
    jsonschema.validate(yaml.safe_load(file.read_text()), schema)


def test_the_schema_refuses_unknown_keys_and_kinds():
    schema = json.loads((ROOT / "workflow" / "schemas" / "study.schema.json").read_text())
    for section, name, key, value in (("attacks", "pgd20", "epsilonn", 1), ("defenses", "madry", "kind", "madri")):
        study = yaml.safe_load((ROOT / "config" / "studies" / "digits.yaml").read_text())
        study[section][name][key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(study, schema)


def keys_of(schema) -> set[str]:
    found = set()
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            found |= set(properties)
        for value in schema.values():
            found |= keys_of(value)
    elif isinstance(schema, list):
        for value in schema:
            found |= keys_of(value)
    return found


def test_every_key_is_documented():
    text = (ROOT / "config" / "README.md").read_text()
    keys = set().union(*(keys_of(make()) for make in SCHEMAS.values()))
    assert len(keys) > 40
    assert sorted(key for key in keys if f"`{key}`" not in text) == []


def test_every_artefact_has_a_function_a_rule_and_a_caption():
    rules = "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    for name in ARTEFACTS:
        assert (name in TABLES) + (name in FIGURES) + name.startswith("bench_") == 1
        assert f"rule {name}:" in rules
        assert (ROOT / "workflow" / "report" / f"{name}.rst").read_text().strip()


@pytest.mark.parametrize("script", ["table", "figure", "page"])
def test_scripts_that_need_no_torch_do_not_import_it(script):
    text = (ROOT / "workflow" / "scripts" / f"{script}.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    code = "\n".join([*imports, "import sys", "assert 'torch' not in sys.modules, sorted(sys.modules)"])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "workflow" / "scripts")


def test_jobs_give_torch_the_threads_of_their_rule():
    code = "import torch; torch.set_num_threads(2); from classwise.devices import use_threads; use_threads(1); "
    code += "assert torch.get_num_threads() == 1; assert torch.get_num_interop_threads() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "workflow" / "scripts")


def test_nothing_in_the_project_unpickles():
    """torch.load appears once, with weights_only; pickle and joblib not at all."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "workflow").rglob("*.py")]:
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|joblib|dill|shelve)", text, re.M), path
        assert not re.search(r"allow_pickle\s*=\s*True|read_pickle", text), path
        for call in re.findall(r"torch\.load\(.*\)", text):
            assert "weights_only=True" in call, path


def test_the_profile_sets_threads_of_rules_that_exist():
    profile = yaml.safe_load((ROOT / "workflow" / "profiles" / "default" / "config.yaml").read_text())
    rules = "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    for section in ("set-threads", "set-resources"):
        for name in profile.get(section, {}):
            assert f"rule {name}:" in rules or f"as {name} with:" in rules
