rule prepare:
    """Store a data set in the project's format, with a fingerprint."""
    output:
        arrays=f"{DATA}/data.safetensors",
        card=f"{DATA}/data.json",
    log:
        f"{RESULTS}/logs/prepare/{{dataset}}.log",
    conda:
        ENVIRONMENT
    params:
        dataset=lambda wildcards: STUDY.dataset(wildcards.dataset),
        source=source("prepare.py", lambda wildcards: STUDY.dataset_modules(wildcards.dataset)),
    message:
        "Prepare data set {wildcards.dataset}"
    script:
        "../scripts/prepare.py"
