"""The defenses: `Defense(run, *, <keys of the study file>)`. One line each."""

from classwise.registry import Registry

DEFENSES = Registry(
    "classwise.defenses",
    "defense kind",
    {
        "standard": "standard:Standard",
        "madry": "madry:Madry",
        "trades": "trades:Trades",
    },
)
