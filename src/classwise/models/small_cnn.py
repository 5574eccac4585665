"""The four-convolution network of the TRADES MNIST experiments (312,202 parameters for 1 x 28 x 28, 10 classes)."""

import torch
from torch import nn


def small_cnn(shape) -> nn.Sequential:
    """Four unpadded 3x3 convolutions, two poolings, two hidden layers of 200. The head starts at zero."""
    channels = shape[0]
    convolutions = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    for layer in convolutions:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    with torch.no_grad():
        flat = convolutions(torch.zeros(1, *shape)).shape[1]
    features = nn.Sequential(
        convolutions, nn.Linear(flat, 200), nn.ReLU(), nn.Dropout(0.5), nn.Linear(200, 200), nn.ReLU()
    )
    features.out_features = 200
    features.zero_head = True
    return features
