"""The architectures. A line: module and function that builds the features, keys with defaults, smallest image side.

The defaults stand here, not in the signature, because the modules subclass `torch.nn.Module`: reading a signature
would import torch, and planning a study must not.
"""

from classwise.models.architecture import Architectures

ARCHITECTURES = Architectures(
    "classwise.models",
    "architecture kind",
    {
        "conv2": ("conv2:conv2", {"width": 16}, 2),
        "small-cnn": ("small_cnn:small_cnn", {}, 16),
        "resnet18": ("resnet:resnet18", {"width": 64}, 1),
    },
)
