"""Class-wise adversarial robustness: data, models, attacks, defenses, measures. It knows nothing of Snakemake."""
