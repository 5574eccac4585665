"""The attacks: `(model, x, y, *, <keys of the study file>, generator) -> x_adv`. One line each."""

from classwise.registry import Registry

ATTACKS = Registry(
    "classwise.attacks",
    "attack kind",
    {
        "none": "none:none",
        "fgsm": "pgd:fgsm",
        "pgd": "pgd:pgd",
        "temperature-pgd": "pgd:temperature_pgd",
        "targeted-pgd": "pgd:targeted_pgd",
        "cw-pgd": "pgd:cw_pgd",
        "cw-linf": "cw_linf:cw_linf",
        "transfer": "transfer:transfer",
        "nattack": "nattack:nattack",
        "autoattack": "autoattack:autoattack",
    },
)

# Minutes to hours each, so a cluster job of its own; the others of one model can share one.
DEAR = frozenset({"cw-linf", "nattack", "autoattack"})
