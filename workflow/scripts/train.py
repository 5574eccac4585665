"""Train one model and write its weights, its card and its history."""

from pathlib import Path

from tqdm import tqdm

from classwise.checkpoints import key_of
from classwise.data.dataset import read_dataset
from classwise.devices import choose_device, peak_memory_mb, platform_facts
from classwise.models.classifier import save_weights, weights_fingerprint
from classwise.randomness import seed_of
from classwise.specs import Training
from classwise.store import HISTORY, write_json, write_table
from classwise.training import Listener, train
from job import job, keep_memory, use_threads

with job(snakemake) as log:
    use_threads(snakemake.threads)
    keep_memory()
    dataset = read_dataset(snakemake.input.arrays, snakemake.input.card)
    device = choose_device(snakemake.config.get("device", "auto"))
    names, todo = dict(snakemake.wildcards), snakemake.params.job
    identity = {
        "study": snakemake.params.study,
        **names,
        "defense_id": names["defense"],
        **todo,
        "data": dataset.card["fingerprint"],
    }
    bar = tqdm(
        total=todo["training"]["epochs"],
        unit="epoch",
        file=log,
        dynamic_ncols=False,
        ncols=110,
        mininterval=0,
    )

    def show(progress):
        accuracies = {"natural": f"{progress.natural:.1f}%", "robust": f"{progress.robust:.1f}%"}
        bar.set_postfix(loss=f"{progress.loss:.3f}", **accuracies, refresh=False)
        bar.update(progress.epoch - bar.n)

    checkpoint = Path(snakemake.params.checkpoint)
    trained = train(
        dataset,
        architecture=todo["architecture"],
        defense=todo["defense"],
        training=Training.model_validate(todo["training"]),
        evaluation=todo["evaluation"],
        removed=None if names["removed"] == "all" else int(names["removed"].removeprefix("no-")),
        seed=seed_of("train", snakemake.params.study, *names.values()),
        checkpoint=checkpoint,
        key=key_of(**identity, source=snakemake.params.source),
        device=device,
        listener=Listener(epoch=show, note=tqdm.write),
    )
    bar.close()
    facts = {
        **platform_facts(device),
        "precision": todo["training"]["precision"],
        "source": snakemake.params.source,
        "seconds": round(float(trained.history["seconds"].max()), 3),
        "peak_memory_mb": round(peak_memory_mb(device), 1),
    }
    state = trained.model.state_dict()
    save_weights(snakemake.output.weights, state)
    write_table(snakemake.output.history, trained.history, {**identity, **facts}, HISTORY)
    write_json(
        snakemake.output.card,
        {
            **identity,
            "classes": trained.model.classes,
            "shape": dataset.shape,
            "epoch": trained.epoch,
            "fingerprint": weights_fingerprint(state),
            **facts,
        },
    )
    # Last: until here a killed job goes on from its checkpoint.
    checkpoint.unlink(missing_ok=True)
