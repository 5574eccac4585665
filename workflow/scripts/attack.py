"""Attack one model and write its outcomes."""

import time

from tqdm import tqdm

from classwise.checkpoints import key_of
from classwise.data.dataset import read_dataset
from classwise.devices import choose_device, keep_memory, peak_memory_mb, platform_facts, use_threads
from classwise.engine import fitting_batch
from classwise.evaluation import Parts, Split, evaluate, sanity_facts
from classwise.models.classifier import load_model
from classwise.randomness import seed_of
from classwise.store import OUTCOMES, write_outcomes
from job import job

with job(snakemake) as log:
    use_threads(snakemake.threads)
    keep_memory()
    dataset = read_dataset(snakemake.input.arrays, snakemake.input.card)
    device = choose_device(snakemake.config.get("device", "auto"))
    model, card = load_model(snakemake.input.weights, snakemake.input.model)
    surrogate = surrogate_card = None
    if snakemake.input.surrogate_weights:
        surrogate, surrogate_card = load_model(snakemake.input.surrogate_weights[0], snakemake.input.surrogate_model[0])
        surrogate = surrogate.to(device)
    split = Split.of(dataset.test_images, dataset.test_labels, model.classes, dataset.levels, device)
    if snakemake.params.view:
        split = split.subset(**snakemake.params.view, classes=model.classes)

    names, keys = dict(snakemake.wildcards), dict(snakemake.params.attack)
    how = {name: keys.pop(name) for name in ("batch_size", "precision", "compile")}
    del keys["view"]
    if how["batch_size"] == "auto":
        image, _ = split.batch(slice(0, 1))
        how["batch_size"] = fitting_batch(model.to(device), image, how["precision"], keys.get("population", 0))
    identity = {
        "study": snakemake.params.study,
        **names,
        "attack_id": names["attack"],
        "attack": keys,
        **how,
        "subset": snakemake.params.view,
        "classes": list(model.classes),
        "data": dataset.card["fingerprint"],
        "model": card["fingerprint"],
        "surrogate_model": surrogate_card and surrogate_card["fingerprint"],
        "source": snakemake.params.source,
    }
    parts = Parts(snakemake.params.parts, key_of(**identity))
    seed, started = seed_of("attack", snakemake.params.study, *names.values()), time.perf_counter()
    with tqdm(total=len(split), unit="image", file=log, ncols=110) as bar:
        outcomes = evaluate(
            model.to(device),
            split,
            keys,
            seed=seed,
            batch_size=how["batch_size"],
            precision=how["precision"],
            compiled=how["compile"],
            surrogate=surrogate,
            parts=parts,
            report=lambda done: bar.update(done - bar.n),
        )
    metadata = {
        **identity,
        "rng_seed": seed,
        "sanity": sanity_facts(outcomes),
        **platform_facts(device),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_memory_mb": round(peak_memory_mb(device), 1),
    }
    write_outcomes(snakemake.output.outcomes, outcomes[OUTCOMES.names], metadata, expected=split.index)
    parts.clear()
    robust = (outcomes["predicted"] == outcomes["label"]).mean()
    log.write(f"{len(outcomes)} examples, {100 * robust:.2f} % classified correctly under {names['attack']}\n")
