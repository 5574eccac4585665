"""Attack one model and write its outcomes."""

import time

from tqdm import tqdm

from classwise.data.dataset import read_dataset
from classwise.devices import choose_device, peak_memory_mb, platform_facts
from classwise.evaluation import Split, evaluate
from classwise.models.classifier import load_model
from classwise.randomness import seed_of
from classwise.store import OUTCOMES, write_outcomes
from job import job, use_threads

with job(snakemake) as log:
    use_threads(snakemake.threads)
    dataset = read_dataset(snakemake.input.arrays, snakemake.input.card)
    device = choose_device(snakemake.config.get("device", "auto"))
    model, card = load_model(snakemake.input.weights, snakemake.input.model)
    model = model.to(device)
    split = Split.of(dataset.test_images, dataset.test_labels, model.classes, dataset.levels, device)
    names, keys = dict(snakemake.wildcards), dict(snakemake.params.attack)
    seed = seed_of("attack", snakemake.params.study, *names.values())
    batch_size, started = keys.pop("batch_size"), time.perf_counter()
    with tqdm(total=len(split), unit="image", file=log, ncols=110) as bar:
        outcomes = evaluate(
            model, split, keys, seed=seed, batch_size=batch_size, report=lambda done: bar.update(done - bar.n)
        )
    metadata = {
        "study": snakemake.params.study,
        **names,
        "attack_id": names["attack"],
        "attack": keys,
        "batch_size": batch_size,
        "classes": list(model.classes),
        "data": dataset.card["fingerprint"],
        "model": card["fingerprint"],
        "rng_seed": seed,
        "precision": "fp32",
        "source": snakemake.params.source,
        **platform_facts(device),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_memory_mb": round(peak_memory_mb(device), 1),
    }
    write_outcomes(snakemake.output.outcomes, outcomes[OUTCOMES.names], metadata, expected=split.index)
    robust = (outcomes["predicted"] == outcomes["label"]).mean()
    log.write(f"{len(outcomes)} examples, {100 * robust:.2f} % classified correctly under {names['attack']}\n")
