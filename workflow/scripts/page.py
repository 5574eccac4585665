"""Put every artefact of the study on one page."""

import shutil
import subprocess
from pathlib import Path

from classwise.page import item, render
from classwise.store import read_json, write_json, write_text
from job import job


def code_version() -> str:
    """The commit of this checkout; not a parameter, or every commit would rebuild the page."""
    if shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


with job(snakemake):
    page = Path(snakemake.output.page)
    cards = {Path(path).parent.name: read_json(path) for path in snakemake.input.cards}
    items = [
        item(name, snakemake.params.captions[name], [Path(file) for file in files], page.parent)
        for name, files in snakemake.params.files.items()
    ]
    write_json(snakemake.output.study, snakemake.params.study)
    write_text(page, render(snakemake.params.study, items, cards, code_version()))
