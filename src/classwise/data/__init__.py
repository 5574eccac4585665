"""The data sets. One line each; a file says what the data are and how to read them."""

from classwise.registry import Registry

DATASETS = Registry(
    "classwise.data",
    "data set kind",
    {
        "digits": "digits:digits",
        "mnist": "mnist:mnist",
        "cifar10": "cifar10:cifar10",
    },
)
