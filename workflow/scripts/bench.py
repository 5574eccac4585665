"""Race our attacks and other libraries' on the models of the study."""

from pathlib import Path

import pandas as pd

from classwise.bench import markdown, raced
from classwise.data.dataset import read_dataset
from classwise.devices import choose_device, platform_facts, use_threads
from classwise.evaluation import Split
from classwise.models.classifier import load_model
from classwise.store import write_table, write_text
from job import job

with job(snakemake) as log:
    use_threads(snakemake.threads)
    device, block = choose_device(snakemake.config.get("device", "auto")), snakemake.params.block
    datasets, models, tables = {}, {}, []
    for arrays, card in zip(snakemake.input.arrays, snakemake.input.cards, strict=True):
        datasets[Path(card).parent.name] = read_dataset(arrays, card)
    for weights, card in zip(snakemake.input.weights, snakemake.input.models, strict=True):
        model, facts = load_model(weights, card)
        models[facts["dataset"], facts["arch"], facts["defense_id"]] = model.to(device)
    for row in snakemake.params.races:
        names = tuple(row[key] for key in ("dataset", "arch", "defense"))
        model, data = models[names], datasets[row["dataset"]]
        split = Split.of(data.test_images, data.test_labels, model.classes, data.levels, device)
        cuts = range(0, row["images"], block["batch_size"])
        batches = [split.batch(slice(k, min(k + block["batch_size"], row["images"]))) for k in cuts]
        log.write(f"{' '.join(names)} under {row['attack']}\n")
        table = raced(
            model, batches, row["keys"], block["repeats"], " ".join(names), lambda line: log.write(f"  {line}\n")
        )
        tables.append(table.assign(**{key: row[key] for key in ("dataset", "arch", "defense", "attack", "images")}))
    table, facts = pd.concat(tables, ignore_index=True), platform_facts(device)
    text, parquet = snakemake.output
    write_table(parquet, table, {"target": snakemake.rule, "keys": block, "provenance": facts})
    write_text(text, markdown(table, f"On {facts['device']}, torch {facts['versions']['torch']}."))
