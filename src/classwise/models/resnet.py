"""ResNet-18 in its CIFAR form: a 3x3 stem without pooling, four stages, global average pooling."""

from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(self, channels: int, blocks: tuple[int, ...], width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages, inputs = [], width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            for stride in strides:
                stages.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.out_features = inputs

    def forward(self, x):
        return self.stages(self.bn1(self.conv1(x)).relu()).mean(dim=(2, 3))


def resnet18(shape, width: int) -> ResNet:
    """11,173,962 parameters for 3 channels, width 64 and 10 classes."""
    return ResNet(shape[0], (2, 2, 2, 2), width)
