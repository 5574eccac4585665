rule train:
    """Train one model. It resumes from its last checkpoint if it was interrupted."""
    input:
        arrays=f"{DATA}/data.safetensors",
        card=f"{DATA}/data.json",
    output:
        weights=f"{RESULTS}/models/{MODEL}/model.safetensors",
        card=f"{RESULTS}/models/{MODEL}/model.json",
        history=f"{RESULTS}/models/{MODEL}/history.parquet",
    log:
        f"{RESULTS}/logs/train/{MODEL}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train/{MODEL}.jsonl"
    conda:
        ENVIRONMENT
    params:
        job=lambda wildcards: STUDY.train_job(wildcards.dataset, wildcards.arch, wildcards.defense),
        study=STUDY.name,
        # Not an output: Snakemake deletes the outputs of a job that fails, and this must survive it.
        checkpoint=lambda wildcards: f"{RESULTS}/checkpoints/{MODEL}/checkpoint.pt".format(**wildcards),
        source=source(
            "train.py",
            lambda wildcards: STUDY.train_modules(wildcards.dataset, wildcards.arch, wildcards.defense),
        ),
    message:
        "Train {wildcards.defense} on {wildcards.dataset}, classes {wildcards.removed}, seed {wildcards.seed}"
    script:
        "../scripts/train.py"
