"""Architectures and the classifier around them."""

import pytest
import torch

from classwise import engine
from classwise.errors import UserError
from classwise.models import ARCHITECTURES
from classwise.models.classifier import build, load_model, save_weights, weights_fingerprint
from classwise.store import write_json
from conftest import small_model


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [("small-cnn", (1, 28, 28), 312_202), ("resnet18", (3, 32, 32), 11_173_962), ("conv2", (1, 8, 8), 71_754)],
)
def test_parameter_counts(kind, shape, count):
    keys = ARCHITECTURES.parameters(kind)().plain()
    assert parameters(build({"kind": kind, **keys}, shape, range(10))) == count


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_every_architecture_takes_images_of_several_shapes_and_any_number_of_classes(kind, shape):
    keys = ARCHITECTURES.parameters(kind)().plain()
    model = build({"kind": kind, **keys}, shape, (0, 2, 7)).eval()
    assert model(torch.rand(2, *shape)).shape == (2, 3)


def test_the_head_of_small_cnn_starts_at_zero():
    model = build({"kind": "small-cnn"}, (1, 28, 28), range(10)).eval()
    assert torch.equal(model(torch.rand(2, 1, 28, 28)), torch.zeros(2, 10))


def test_normalisation_is_the_first_layer():
    keys = {"kind": "conv2", "width": 2}
    plain = build(keys, (1, 8, 8), range(10), seed=3).eval()
    normalised = build({**keys, "mean": [0.5], "std": [0.25]}, (1, 8, 8), range(10), seed=3).eval()
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(normalised(x), plain((x - 0.5) / 0.25))


def test_the_seed_decides_the_weights_and_global_randomness_is_left_alone():
    before = torch.get_rng_state()
    first, same, other = small_model(1), small_model(1), small_model(2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.head.weight, same.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


def card(model) -> dict:
    return {
        "architecture": {"kind": "conv2", "width": 2},
        "shape": [1, 8, 8],
        "classes": list(model.classes),
        "fingerprint": weights_fingerprint(model.state_dict()),
    }


def test_a_stored_model_comes_back_the_same(tmp_path):
    model = small_model(classes=(0, 1, 5))
    save_weights(tmp_path / "model.safetensors", model.state_dict())
    write_json(tmp_path / "model.json", card(model))
    found, _ = load_model(tmp_path / "model.safetensors", tmp_path / "model.json")
    x = torch.rand(3, 1, 8, 8)
    assert found.classes == (0, 1, 5)
    assert torch.equal(found(x), model(x))


def test_equal_weights_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        save_weights(tmp_path / name, small_model(4).state_dict())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "other network", "altered"])
def test_weights_that_do_not_fit_their_card_are_named(tmp_path, damage):
    model = small_model()
    weights = tmp_path / "model.safetensors"
    save_weights(weights, model.state_dict())
    write_json(tmp_path / "model.json", card(model) | ({"classes": [0, 1]} if damage == "other network" else {}))
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "altered":
        save_weights(weights, small_model(seed=1).state_dict())
    with pytest.raises(UserError, match=r"model\.safetensors: not the weights"):
        load_model(weights, tmp_path / "model.json")


def test_a_card_that_lacks_something_is_named(tmp_path):
    write_json(tmp_path / "model.json", {})
    with pytest.raises(UserError, match=r"model\.json: lacks architecture"):
        load_model(tmp_path / "model.safetensors", tmp_path / "model.json")


def test_the_fitting_batch_grows_with_the_budget_and_shrinks_with_the_image(monkeypatch):
    model = build({"kind": "resnet18", "width": 8}, (3, 32, 32), range(10)).eval().requires_grad_(False)

    def size(side=32, precision="fp32", queries=0):
        return engine.fitting_batch(model, torch.zeros(1, 3, side, side), precision, queries)

    monkeypatch.setattr(engine, "CPU_BUDGET", 2**26)
    assert size() & (size() - 1) == 0, "a power of two"
    assert size() in (2 * size(side=48), 4 * size(side=48))
    assert size(precision="bf16") == 2 * size(), "bfloat16 is half as large"
    assert 1 <= size(queries=300) < size()
    monkeypatch.setattr(engine, "CPU_BUDGET", 2**27)
    doubled = size()
    monkeypatch.setattr(engine, "CPU_BUDGET", 2**26)
    assert doubled == 2 * size()
    monkeypatch.setattr(engine, "CPU_BUDGET", 1)
    assert size() == 1, "one image is always tried"
    monkeypatch.setattr(engine, "CPU_BUDGET", 2**60)
    assert size() == engine.LARGEST["cpu"]
