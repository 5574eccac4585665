rule attack:
    """Attack one model and store the outcome of every test example."""
    input:
        arrays=f"{DATA}/data.safetensors",
        card=f"{DATA}/data.json",
        weights=f"{RESULTS}/models/{MODEL}/model.safetensors",
        model=f"{RESULTS}/models/{MODEL}/model.json",
        surrogate_weights=surrogate("model.safetensors"),
        surrogate_model=surrogate("model.json"),
    output:
        outcomes=OUTCOMES,
    log:
        f"{RESULTS}/logs/attack/{MODEL}/{{view}}/{{attack}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/attack/{MODEL}/{{view}}/{{attack}}.jsonl"
    wildcard_constraints:
        attack=one_of(STUDY.cheap_attacks),
    # On a cluster the attacks of one model share a job: see `group-components` in profiles/slurm.
    group:
        f"attacks-of-{MODEL}"
    conda:
        ENVIRONMENT
    params:
        attack=lambda wildcards: STUDY.attack(wildcards.attack, wildcards.dataset, wildcards.defense),
        study=STUDY.name,
        view=lambda wildcards: STUDY.file.views[wildcards.view].plain() if wildcards.view != "test" else None,
        # Not an output: finished batches must survive a job that fails.
        parts=lambda wildcards: f"{RESULTS}/checkpoints/{MODEL}/{{view}}/{{attack}}".format(**wildcards),
        source=source(
            "attack.py",
            lambda wildcards: STUDY.attack_modules(
                wildcards.dataset, wildcards.arch, wildcards.defense, wildcards.attack
            ),
        ),
    message:
        "Attack {wildcards.defense} on {wildcards.dataset}, classes {wildcards.removed}, seed {wildcards.seed} with {wildcards.attack}"
    script:
        "../scripts/attack.py"


# The dear attacks, each a cluster job of its own: a group of one, as None would leave it in the group above.
use rule attack as dear_attack with:
    wildcard_constraints:
        attack=one_of(STUDY.dear_attacks),
    group:
        f"attack-of-{MODEL}/{{view}}/{{attack}}"
