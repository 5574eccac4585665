"""A copy of the repository with a study that takes seconds, to run the real workflow in."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from conftest import ROOT

# Everything of `digits`, smaller: two seeds, two epochs, two removed classes.
TINY = {
    "title": "A study for the tests",
    "seeds": [0, 1],
    "datasets": {"digits": {"kind": "digits", "train": 300}},
    "architectures": {"conv2": {"kind": "conv2", "width": 4}},
    "training": {"epochs": 2, "batch_size": 50, "optimizer": {"lr": 0.05}, "evaluate": "pgd2"},
    "defenses": {
        "standard": {"kind": "standard", "training": {"epochs": 10, "batch_size": 10}},  # robust enough for a race
        "madry": {"kind": "madry", "attack": {"epsilon": 0.2, "steps": 2, "step_size": 0.1}},
    },
    "attacks": {
        "natural": {"kind": "none"},
        "pgd2": {"kind": "pgd", "epsilon": 0.2, "steps": 2, "step_size": 0.1},
        "pgd": {"kind": "pgd", "epsilon": 0.2, "steps": 5, "step_size": 0.1},
        "transfer": {"kind": "transfer", "surrogate": "standard", "epsilon": 0.2, "steps": 2, "step_size": 0.1},
        "weak": {"kind": "pgd", "epsilon": 0.01, "steps": 2, "step_size": 0.01},
        "few": {"kind": "pgd", "epsilon": 0.2, "steps": 2, "step_size": 0.1, "protocol": "any", "view": "n5"},
        "tpgd-5": {"kind": "temperature-pgd", "inverse_temperature": 5, "epsilon": 0.2, "steps": 5, "step_size": 0.1},
    },
    "views": {"n5": {"per_class": 5}},
    "artefacts": {
        "tian21_table1": {
            "dataset": "digits",
            "arch": "conv2",
            "defenses": ["standard", "madry"],
            "attacks": ["natural", "pgd"],
        },
        "tian21_table3": {
            "dataset": "digits",
            "arch": "conv2",
            "defenses": ["madry"],
            "baseline": "pgd",
            "attacks": ["tpgd-5"],
        },
        "tian21_table5": {
            "rows": [
                {
                    "dataset": "digits",
                    "arch": "conv2",
                    "standard": "standard",
                    "natural": "natural",
                    "adversarial": "madry",
                    "attack": "pgd",
                }
            ]
        },
        "tian21_figure1": {"panels": [{"dataset": "digits", "arch": "conv2", "defense": "madry"}]},
        "tian21_figure2": {"panels": [{"dataset": "digits", "arch": "conv2", "defense": "madry", "attack": "pgd"}]},
        "tian21_figure4": {
            "dataset": "digits",
            "arch": "conv2",
            "defense": "madry",
            "attack": "pgd",
            "removed": [3, 8],
        },
        "bench_attacks": {
            "rows": [{"dataset": "digits", "arch": "conv2", "defense": "standard", "attack": "weak", "images": 100}],
            "repeats": 1,
        },
    },
}
MODEL = "models/digits/conv2"


@dataclass(frozen=True)
class Checkout:
    """A folder to run snakemake in, as a user would."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, study: dict = TINY) -> "Checkout":
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("workflow", "config", "src"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "environment.yml", folder)
        (folder / "slurm").symlink_to("workflow/profiles/slurm")
        checkout = cls(folder)
        checkout.write_study(study)
        checkout.replace("config/config.yaml", "study: digits", "study: tiny")
        return checkout

    def write_study(self, study: dict) -> None:
        (self.folder / "config" / "studies" / "tiny.yaml").write_text(yaml.safe_dump(study))

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new, 1))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        # scripts run under the python that is first on the path
        return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}

    def snakemake(self, *arguments: str, fails: bool = False) -> str:
        """Run snakemake here and return what it printed; it must succeed, or fail if that is expected."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout[-6000:]
        return done.stdout

    def planned(self, *arguments: str) -> dict[str, int]:
        """How many jobs of each rule a dry run would start."""
        text = self.snakemake("-n", *arguments)
        rows = re.findall(r"^(\w+)\s+(\d+)$", text, re.M)
        return {rule: int(count) for rule, count in rows if rule not in ("total", "all")}

    def result(self, path: str) -> Path:
        return self.folder / "results" / "tiny" / path
