"""A model prepared for attack: frozen, batch norm folded, in the layout and precision that the hardware likes best.

Attacks climb on the prepared copy; who is fooled is always decided by the model itself, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from classwise.models.classifier import Classifier

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepared(
    model: Classifier, precision: str = "fp32", compiled: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A frozen copy that maps float32 images to float32 logits, with gradients of the images only.

    Folding the batch norms into the convolutions is exact up to rounding. In bf16 weights and activations are bfloat16.
    """
    if model.training:
        raise ValueError("only a model in evaluation mode can be prepared for attack")
    dtype = PRECISIONS[precision]
    frozen = folded(copy.deepcopy(model)).to(dtype=dtype, memory_format=torch.channels_last).requires_grad_(False)
    run = torch.compile(frozen) if compiled else frozen

    def logits(x: torch.Tensor) -> torch.Tensor:
        return run(x.to(dtype=dtype, memory_format=torch.channels_last)).float()

    return logits


def fitting_batch(model: Classifier, image: torch.Tensor, precision: str = "fp32", queries: int = 0) -> int:
    """The largest batch, a power of two, whose gradients fit: into half of a GPU's free memory, into 1 GiB on a CPU.

    `image` is a batch of one. Counted is what a backward pass of it keeps. An attack that takes no gradients but asks
    `queries` questions of each example at once keeps a few layers of each at a time.
    """
    fast = prepared(model, precision)
    each = (_kept_bytes(fast, image, 4) - _kept_bytes(fast, image, 2)) // 2  # the difference does not count weights
    each = each * queries // QUERY_SAVING if queries else each
    fits = _budget(image.device) // max(each, 1)
    return 2 ** (max(1, min(fits, LARGEST[image.device.type])).bit_length() - 1)


# Small networks gain nothing from more; beyond this a killed attack would lose too much.
LARGEST = {"cpu": 512, "cuda": 4096}
QUERY_SAVING = 2  # measured on ResNet-18: a query without gradients holds about a third of what a gradient keeps
CPU_BUDGET = 2**30
GPU_SHARE = 0.5  # of what is free: kernels need room of their own


def _budget(device: torch.device) -> int:
    return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else CPU_BUDGET


def _kept_bytes(run: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor, count: int) -> int:
    """The size of all that autograd keeps for the backward pass of `count` images."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = run(image.expand(count, *image.shape[1:]).clone().requires_grad_())
    del logits
    return sum(kept.values())


def folded(model: nn.Module) -> nn.Module:
    """The model with every batch norm that follows a convolution, and nothing else does, folded into it."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return model
    try:
        traced = fx.symbolic_trace(model)
    except fx.proxy.TraceError:
        return model  # a forward pass that depends on its input cannot be traced: it runs as it is
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        convolution = modules.get(before.target) if before.op == "call_module" else None
        if isinstance(convolution, nn.Conv2d) and len(before.users) == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, modules[node.target]))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced
