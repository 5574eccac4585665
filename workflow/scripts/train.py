"""Train one model and write its weights, its card and its history."""

from classwise.processes import launch
from classwise.runs import train_files
from job import job

with job(snakemake):
    request = {
        "arrays": snakemake.input.arrays,
        "data_card": snakemake.input.card,
        "weights": snakemake.output.weights,
        "card": snakemake.output.card,
        "history": snakemake.output.history,
        "log": snakemake.log[0],
        "study": snakemake.params.study,
        "names": dict(snakemake.wildcards),
        "job": snakemake.params.job,
        "checkpoint": snakemake.params.checkpoint,
        "source": snakemake.params.source,
        "threads": snakemake.threads,
        "device": snakemake.config.get("device", "auto"),
        "saving": {
            "epochs": snakemake.config.get("checkpoint_epochs", 1),
            "minutes": snakemake.config.get("checkpoint_minutes", 10),
        },
    }
    launch(train_files, (request,), snakemake.params.job["training"]["processes"])
