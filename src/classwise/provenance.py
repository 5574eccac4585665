"""Where an artefact's numbers come from, in a few lines, from the metadata of the files behind it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from classwise.store import read_metadata


def summary(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Models, attacks, data, code, machines and time behind outcomes and history files."""
    facts = [read_metadata(path) for path in paths]
    models = {tuple(f.get(key) for key in ("dataset", "arch", _defense(f), "removed", "seed")) for f in facts}
    return {
        "files": len(facts),
        "models": len(models),
        "seeds": sorted({int(f["seed"]) for f in facts}),
        "datasets": {f["dataset"]: f["data"] for f in facts},
        "attacks": {f["attack_id"]: f["attack"] for f in facts if "attack_id" in f},
        "code": sorted({f["source"] for f in facts}),
        "devices": sorted({f["device"] for f in facts}),
        "precision": sorted({f["precision"] for f in facts}),
        "versions": facts[0]["versions"] if facts else {},
        "seconds": round(sum(f["seconds"] for f in facts), 1),
    }


def _defense(facts: dict[str, Any]) -> str:
    return "defense_id" if "defense_id" in facts else "defense"
