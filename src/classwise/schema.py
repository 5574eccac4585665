"""The JSON schemas of config.yaml and of study files, made from the code that reads them.

`python -m classwise.schema workflow/schemas` writes them (`make schemas`); a test fails when they are out of step.
Editors use them to complete and check keys; the workflow itself checks more and tells it better (`study.py`).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from classwise.artefacts import ARTEFACTS
from classwise.parameters import Parameters
from classwise.specs import Training
from classwise.store import write_json
from classwise.study import SECTIONS, Config, StudyFile, When

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    return {"$schema": DIALECT, **Config.model_json_schema()}


def study_schema() -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    definitions["TrainingChanges"] = {**_inlined(Training, definitions), "required": []}
    definitions["Overrides"] = _overrides(definitions)
    training, overrides = {"$ref": "#/$defs/TrainingChanges"}, {"$ref": "#/$defs/Overrides"}
    extra = {"defenses": {"training": training, "overrides": overrides}, "attacks": {"overrides": overrides}}
    schema = _inlined(StudyFile, definitions)
    for name, (registry, parameters) in SECTIONS.items():
        kinds = [_method(kind, parameters, extra.get(name, {}), definitions) for kind in registry]
        schema["properties"][name] = {
            **_described(schema["properties"][name]),
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["kind"],
                "properties": {"kind": {"enum": list(registry)}},
                "allOf": kinds,
            },
        }
    schema["properties"]["training"] = _inlined(Training, definitions)
    schema["properties"]["training"]["properties"]["overrides"] = overrides
    schema["properties"]["artefacts"] = {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": {name: _inlined(model, definitions) for name, model in ARTEFACTS.items()},
    }
    return {"$schema": DIALECT, **schema, "$defs": dict(sorted(definitions.items()))}


def _method(kind: str, parameters: Callable[[str], type[Parameters]], extra: dict, definitions: dict) -> dict[str, Any]:
    body = _inlined(parameters(kind), definitions)
    body["properties"] = {"kind": {"const": kind}, **body.get("properties", {}), **extra}
    return {"if": {"properties": {"kind": {"const": kind}}}, "then": body}


def _overrides(definitions: dict) -> dict[str, Any]:
    when = {**_inlined(When, definitions), "minProperties": 1}
    return {"type": "array", "items": {"type": "object", "required": ["when"], "properties": {"when": when}}}


def _inlined(model: type[BaseModel], definitions: dict) -> dict[str, Any]:
    """The schema of a group, its nested groups moved to the shared definitions."""
    schema = model.model_json_schema()
    definitions.update(schema.pop("$defs", {}))
    schema.pop("title", None)
    return schema


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("description", "minProperties") if key in schema}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "config.schema.json": config_schema,
    "study.schema.json": study_schema,
}

if __name__ == "__main__":
    for file, make in SCHEMAS.items():
        write_json(Path(sys.argv[1]) / file, json.loads(json.dumps(make())))
