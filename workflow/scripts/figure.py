"""Draw the figure that the rule is named after."""

from pathlib import Path

from classwise.plots import FIGURES, save
from classwise.provenance import summary
from classwise.store import gather_histories, gather_outcomes, read_json, write_table
from job import job

with job(snakemake):
    cards = {Path(path).parent.name: read_json(path) for path in snakemake.input.cards}
    gather, files = (
        (gather_outcomes, snakemake.input.outcomes)
        if snakemake.input.outcomes
        else (gather_histories, snakemake.input.histories)
    )
    facts = {"target": snakemake.rule, "keys": snakemake.params.block, "provenance": summary(files)}
    drawn = FIGURES[snakemake.rule](gather(files), cards, snakemake.params.block)
    for path in map(Path, snakemake.output):
        if path.suffix == ".parquet":
            write_table(path, drawn.numbers, facts)
        else:
            save(drawn.figures[path.stem], path)
