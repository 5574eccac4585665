"""Two convolutions and a hidden layer: for 8 x 8 digits, trained in seconds on one thread."""

from torch import nn


def conv2(shape, width: int) -> nn.Sequential:
    """3x3 convolutions to `width` and 2 `width` channels, one 2x2 max-pooling, 8 `width` hidden units."""
    channels, height, side = shape
    hidden = 8 * width
    features = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 2) * (side // 2), hidden),
        nn.ReLU(),
    )
    features.out_features = hidden
    return features
