"""The study on one self-contained page: tables, figures, what each shows, how to rebuild it, where it comes from."""

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from classwise.sanity import MARK as WARNING
from classwise.store import read_metadata

PAPERS = {
    "tian21": "Tian et al., Analysis and Applications of Class-wise Robustness in Adversarial Training, KDD 2021",
    "bench": "What the attacks cost, beside other libraries on the same model, images and machine",
}


@dataclass(frozen=True)
class Item:
    """One artefact on the page."""

    name: str
    title: str
    caption: str
    files: list[str]  # relative to the page
    images: list[tuple[str, str]]  # data URI, description
    table: Markup | None
    warnings: list[str]  # of the sanity report
    provenance: str


def item(name: str, caption: str, files: Sequence[Path], folder: Path) -> Item:
    """An artefact from the files that its rule made; the parquet file carries the provenance."""
    by_suffix: dict[str, list[Path]] = {}
    for file in files:
        by_suffix.setdefault(file.suffix, []).append(file)
    paper, _, what = name.partition("_")
    kind, number = re.fullmatch(r"([a-z]+)(\w*)", what).groups()
    markdown, facts = by_suffix.get(".md", []), read_metadata(by_suffix[".parquet"][0])
    return Item(
        name=name,
        title=f"{paper} {kind.capitalize()} {number}",
        caption=caption.strip(),
        files=[str(file.relative_to(folder)) for file in files],
        images=[(_data_uri(image), f"{name}: {image.stem}") for image in by_suffix.get(".png", [])],
        table=markdown_table(markdown[0].read_text(encoding="utf-8")) if markdown else None,
        warnings=facts.get("sanity", []),
        provenance=json.dumps(facts.get("provenance", {}), indent=2),
    )


def render(study: Mapping[str, Any], items: Sequence[Item], cards: Mapping[str, Any], version: str) -> str:
    environment = Environment(
        loader=PackageLoader("classwise"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    papers = {}
    for one in items:
        papers.setdefault(one.name.partition("_")[0], []).append(one)
    return environment.get_template("page.html").render(
        study=study,
        papers=papers,
        warned=[one for one in items if one.warnings],
        titles=PAPERS,
        cards=cards,
        version=version,
        configuration=json.dumps(study, indent=2),
    )


def markdown_table(text: str) -> Markup:
    """Our own Markdown tables (a pipe table, then paragraphs) as HTML."""
    lines = text.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, rule, *body = rows
    right = [cell.endswith(":") for cell in rule]
    parts = ['<div class="scroll"><table><thead><tr>']
    parts += [
        f'<th scope="col" class="{_style(cell, number)}">{html.escape(cell)}</th>'
        for cell, number in zip(header, right, strict=True)
    ]
    parts.append("</tr></thead><tbody>")
    for row in body:
        cells = [
            f'<td class="{_style(cell, number)}">{_text(cell)}</td>' for cell, number in zip(row, right, strict=True)
        ]
        parts.append(f"<tr>{''.join(cells)}</tr>")
    parts.append("</tbody></table></div>")
    notes = [line for line in lines if line and not line.startswith("|")]
    parts += [
        f'<p class="{"warning" if note.startswith(WARNING) else "note"}">{html.escape(note)}</p>' for note in notes
    ]
    return Markup("".join(parts))


def _style(cell: str, number: bool) -> str:
    mark = {"▲": " robust", "▼": " vulnerable"}.get(cell[:1], "")
    return ("number" if number else "name") + mark


def _text(cell: str) -> str:
    """The interval stands smaller below its number, so that ten classes fit on a screen."""
    number, sign, interval = html.escape(cell).partition(" ± ")
    return f"{number} <small>± {interval}</small>" if sign else number


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
