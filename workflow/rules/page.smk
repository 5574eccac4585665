rule page:
    """results/<study>/index.html: every table and figure of the study on one page that needs no network."""
    input:
        artefacts=lambda wildcards: [file for name in STUDY.artefacts for file in artefact_files(name)],
        cards=expand(f"{DATA}/data.json", dataset=STUDY.file.datasets),
    output:
        page=report(
            f"{RESULTS}/index.html",
            caption=caption("page"),
            category="overview",
            labels={"artefact": "page", "shows": "the whole study"},
        ),
        study=f"{RESULTS}/study.json",
    log:
        f"{RESULTS}/logs/page.log",
    conda:
        ENVIRONMENT
    params:
        study=STUDY.resolved(),
        files={name: artefact_files(name) for name in STUDY.artefacts},
        captions=lambda wildcards: {name: (WORKFLOW / "report" / f"{name}.rst").read_text() for name in STUDY.artefacts},
        source=source("page.py", files=["templates/page.html"]),
    message:
        "Put the study on one page"
    script:
        "../scripts/page.py"
