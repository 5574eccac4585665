"""Build the table that the rule is named after."""

from pathlib import Path

from classwise.provenance import summary
from classwise.store import gather_outcomes, read_json, write_table, write_text
from classwise.tables import TABLES
from job import job

with job(snakemake):
    build, markdown = TABLES[snakemake.rule]
    cards = {Path(path).parent.name: read_json(path) for path in snakemake.input.cards}
    outcomes = gather_outcomes(snakemake.input.outcomes)
    table = build(outcomes, cards, snakemake.params.block)
    text, parquet = snakemake.output
    facts = {
        "target": snakemake.rule,
        "keys": snakemake.params.block,
        "provenance": summary(snakemake.input.outcomes),
    }
    write_table(parquet, table, facts)
    write_text(text, markdown(table, cards))
