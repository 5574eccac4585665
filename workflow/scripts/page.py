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
    files = [Path(path) for path in snakemake.input.artefacts]
    items = [
        item(
            name,
            snakemake.params.captions[name],
            [file for file in files if file.stem.startswith(name)],
            page.parent,
        )
        for name in snakemake.params.artefacts
    ]
    write_json(snakemake.output.study, snakemake.params.study)
    write_text(page, render(snakemake.params.study, items, cards, code_version()))
