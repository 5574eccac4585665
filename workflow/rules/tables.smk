# Each table is a target by its own name, and one function of classwise.tables with that name.


rule tian21_table1:
    """tian21 Table 1: class-wise accuracy of each defense under each attack, with CV and MCD."""
    input:
        unpack(needs("tian21_table1")),
    output:
        report(
            f"{RESULTS}/tables/tian21_table1.md",
            caption=caption("tian21_table1"),
            category="tian21",
            labels={
                "artefact": "Table 1",
                "shows": "defenses under attacks, class by class",
            },
        ),
        f"{RESULTS}/tables/tian21_table1.parquet",
    log:
        f"{RESULTS}/logs/tables/tian21_table1.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_table1"),
        source=source("table.py"),
    message:
        "Make {rule}"
    script:
        "../scripts/table.py"


rule tian21_table3:
    """tian21 Table 3: Temperature-PGD for each 1/T, with the differences to PGD."""
    input:
        unpack(needs("tian21_table3")),
    output:
        report(
            f"{RESULTS}/tables/tian21_table3.md",
            caption=caption("tian21_table3"),
            category="tian21",
            labels={"artefact": "Table 3", "shows": "Temperature-PGD against PGD"},
        ),
        f"{RESULTS}/tables/tian21_table3.parquet",
    log:
        f"{RESULTS}/logs/tables/tian21_table3.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_table3"),
        source=source("table.py"),
    message:
        "Make {rule}"
    script:
        "../scripts/table.py"


rule tian21_table5:
    """tian21 Table 5: CV and MCD of standard and of adversarial training."""
    input:
        unpack(needs("tian21_table5")),
    output:
        report(
            f"{RESULTS}/tables/tian21_table5.md",
            caption=caption("tian21_table5"),
            category="tian21",
            labels={
                "artefact": "Table 5",
                "shows": "standard against adversarial training",
            },
        ),
        f"{RESULTS}/tables/tian21_table5.parquet",
    log:
        f"{RESULTS}/logs/tables/tian21_table5.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_table5"),
        source=source("table.py"),
    message:
        "Make {rule}"
    script:
        "../scripts/table.py"
