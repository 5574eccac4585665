# Each figure is a target by its own name, and one function of classwise.plots for each of its panels.


rule tian21_figure1:
    """tian21 Figure 1: class-wise robustness over the epochs, the gap between best and worst class shaded."""
    input:
        unpack(needs("tian21_figure1")),
    output:
        report(
            f"{RESULTS}/figures/tian21_figure1.png",
            caption=caption("tian21_figure1"),
            category="tian21",
            labels={
                "artefact": "Figure 1",
                "shows": "robustness of each class while training",
            },
        ),
        f"{RESULTS}/figures/tian21_figure1.pdf",
        f"{RESULTS}/tables/tian21_figure1.parquet",
    log:
        f"{RESULTS}/logs/figures/tian21_figure1.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_figure1"),
        source=source("figure.py"),
    message:
        "Draw {rule}"
    script:
        "../scripts/figure.py"


rule tian21_figure2:
    """tian21 Figure 2: confusion matrix of robustness, in percent of each true class."""
    input:
        unpack(needs("tian21_figure2")),
    output:
        report(
            f"{RESULTS}/figures/tian21_figure2.png",
            caption=caption("tian21_figure2"),
            category="tian21",
            labels={"artefact": "Figure 2", "shows": "which classes break into which"},
        ),
        f"{RESULTS}/figures/tian21_figure2.pdf",
        f"{RESULTS}/tables/tian21_figure2.parquet",
    log:
        f"{RESULTS}/logs/figures/tian21_figure2.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_figure2"),
        source=source("figure.py"),
    message:
        "Draw {rule}"
    script:
        "../scripts/figure.py"


rule tian21_figure4:
    """tian21 Figure 4: (a) misclassified examples, (b) homing when the confound class is removed."""
    input:
        unpack(needs("tian21_figure4")),
    output:
        report(
            f"{RESULTS}/figures/tian21_figure4a.png",
            caption=caption("tian21_figure4"),
            category="tian21",
            labels={"artefact": "Figure 4a", "shows": "misclassified examples"},
        ),
        report(
            f"{RESULTS}/figures/tian21_figure4b.png",
            caption=caption("tian21_figure4"),
            category="tian21",
            labels={
                "artefact": "Figure 4b",
                "shows": "examples that come home without their confound class",
            },
        ),
        f"{RESULTS}/figures/tian21_figure4a.pdf",
        f"{RESULTS}/figures/tian21_figure4b.pdf",
        f"{RESULTS}/tables/tian21_figure4.parquet",
    log:
        f"{RESULTS}/logs/figures/tian21_figure4.log",
    conda:
        ENVIRONMENT
    params:
        block=artefact_block("tian21_figure4"),
        source=source("figure.py"),
    message:
        "Draw {rule}"
    script:
        "../scripts/figure.py"
