"""The architectures. A line names the module and function that builds the features, and its keys with defaults.

The defaults stand here, not in the signature, because the modules subclass `torch.nn.Module`: reading a signature
would import torch, and planning a study must not.
"""

from classwise.models.architecture import Architectures

ARCHITECTURES = Architectures(
    "classwise.models",
    "architecture kind",
    {
        "conv2": ("conv2:conv2", {"width": 16}),
        "small-cnn": ("small_cnn:small_cnn", {}),
        "resnet18": ("resnet:resnet18", {"width": 64}),
    },
)
