"""The defenses: `Defense(run, *, <keys of the study file>)`. One line each."""

from classwise.registry import Registry

DEFENSES = Registry(
    "classwise.defenses",
    "defense kind",
    {
        "standard": "standard:Standard",
        "madry": "madry:Madry",
        "trades": "trades:Trades",
        "mart": "mart:Mart",
        "he": "he:He",
        "he-lis": "he_lis:HeLis",
        "he-cmp": "he_cmp:HeCmp",
        "fast": "fast:Fast",
    },
)
