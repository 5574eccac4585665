rule bench_attacks:
    """Our attacks, torchattacks, foolbox and ART on the same models and images, in turn (make bench)."""
    input:
        unpack(needs("bench_attacks")),
    output:
        report(
            f"{RESULTS}/attacks.md",
            caption=caption("bench_attacks"),
            category="bench",
            labels={"artefact": "attacks", "shows": "time and strength beside other libraries"},
        ),
        f"{RESULTS}/attacks.parquet",
    log:
        f"{RESULTS}/logs/bench_attacks.log",
    conda:
        ENVIRONMENT
    # Alone on the machine: times mean nothing beside other jobs.
    threads: workflow.cores
    params:
        races=races,
        block=artefact_block("bench_attacks"),
        source=source("bench.py"),
    message:
        "Race the attacks"
    script:
        "../scripts/bench.py"
