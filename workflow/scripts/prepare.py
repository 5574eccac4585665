"""Prepare one data set."""

from pathlib import Path

from classwise.data import DATASETS
from classwise.data.dataset import prepare
from job import job

with job(snakemake) as log:
    keys = dict(snakemake.params.dataset)
    kind = keys.pop("kind")
    prepare(
        kind,
        DATASETS[kind],
        keys,
        Path(snakemake.config.get("data_root", "data")),
        Path(snakemake.output.arrays),
        Path(snakemake.output.card),
    )
    log.write(Path(snakemake.output.card).read_text())
