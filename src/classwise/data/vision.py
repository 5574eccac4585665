"""torchvision, importable beside any torch.

The torchvision wheel of the package index is linked against CUDA. Beside a CPU build of torch its compiled operators
cannot load, and `import torchvision` fails because it registers meta kernels for two of them. Declaring these two
names first lets the import go through; data sets, transforms and models work, `torchvision.ops.nms` does not.
Where torchvision is whole this module does nothing but import it.
"""

import torch

_library = None  # keeps the declarations alive

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
