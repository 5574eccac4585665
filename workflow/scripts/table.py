"""Build the table that the rule is named after."""

from pathlib import Path

from classwise import sanity
from classwise.provenance import summary
from classwise.store import gather_outcomes, read_json, read_metadata, write_table, write_text
from classwise.tables import TABLES
from job import job

with job(snakemake):
    build, markdown = TABLES[snakemake.rule]
    cards = {Path(path).parent.name: read_json(path) for path in snakemake.input.cards}
    outcomes = gather_outcomes(snakemake.input.outcomes)
    table = build(outcomes, cards, snakemake.params.block)
    warnings = sanity.report(outcomes, [read_metadata(path) for path in snakemake.input.outcomes])
    text, parquet = snakemake.output
    facts = {
        "target": snakemake.rule,
        "keys": snakemake.params.block,
        "sanity": warnings,
        "provenance": summary(snakemake.input.outcomes),
    }
    write_table(parquet, table, facts)
    write_text(text, f"{markdown(table, cards)}\n{sanity.markdown(warnings)}")
