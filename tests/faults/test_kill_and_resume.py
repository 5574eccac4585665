"""A killed training goes on where it was, and ends with the weights it would have had."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

import psutil
import pytest
from checkout import MODEL, TINY, Checkout

from classwise.store import read_metadata, read_outcomes

# Long enough to be killed in the middle, short enough for a test.
STUDY = {**TINY, "training": {**TINY["training"], "epochs": 40, "batch_size": 10}}
TARGET = f"{MODEL}/madry/all/0/model.safetensors"
OUTCOMES = "outcomes/digits/conv2/madry/all/0/test/pgd.parquet"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Checkout:
    checkout = Checkout.at(tmp_path_factory.mktemp("undisturbed"), STUDY)
    checkout.snakemake(f"results/tiny/{OUTCOMES}")
    return checkout


def wait_for(condition, seconds: float = 120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def training_process(main: psutil.Process) -> psutil.Process | None:
    """The process that runs the training script."""
    for child in main.children(recursive=True):
        try:
            if any("train.py" in part for part in child.cmdline()) and "python" in Path(child.exe()).name:
                return child
        except psutil.Error:
            continue
    return None


def test_kill_9_in_the_middle_of_an_epoch_costs_nothing_but_the_epoch(undisturbed, tmp_path):
    disturbed = Checkout.at(tmp_path / "disturbed", STUDY)
    checkpoint = disturbed.result("checkpoints/digits/conv2/madry/all/0/checkpoint.pt")
    command = disturbed.command(f"results/tiny/{OUTCOMES}")
    main = subprocess.Popen(
        command, cwd=disturbed.folder, env=disturbed.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(checkpoint.exists)
    time.sleep(0.35)  # a few epochs later, somewhere inside one
    os.kill(wait_for(lambda: training_process(psutil.Process(main.pid))).pid, signal.SIGKILL)
    assert main.wait(timeout=120) != 0
    assert checkpoint.exists(), "the checkpoint must survive Snakemake's cleaning of failed outputs"
    assert not disturbed.result(TARGET).exists()

    disturbed.snakemake(f"results/tiny/{OUTCOMES}")  # the same command

    log = disturbed.result("logs/train/digits/conv2/madry/all/0.log").read_text()
    assert "found: training goes on from there" in log
    assert disturbed.result(TARGET).read_bytes() == undisturbed.result(TARGET).read_bytes()
    assert read_outcomes(disturbed.result(OUTCOMES)).equals(read_outcomes(undisturbed.result(OUTCOMES)))
    assert not checkpoint.exists()


@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGUSR1])
def test_a_training_that_is_told_to_stop_saves_and_says_so_by_its_exit_code(undisturbed, tmp_path, notice):
    disturbed = Checkout.at(tmp_path / "disturbed", STUDY)
    disturbed.replace("config/config.yaml", "checkpoint_epochs: 1", "checkpoint_epochs: 1000")
    log = disturbed.result("logs/train/digits/conv2/madry/all/0.log")
    main = subprocess.Popen(
        disturbed.command(f"results/tiny/{TARGET}"),
        cwd=disturbed.folder,
        env=disturbed.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: log.exists() and "update/s" in log.read_text())
    os.kill(wait_for(lambda: training_process(psutil.Process(main.pid))).pid, notice)
    printed, _ = main.communicate(timeout=120)
    assert "exit status 75" in printed
    assert "Stopped: stopped in epoch" in log.read_text()
    disturbed.snakemake(f"results/tiny/{TARGET}")
    assert "found: training goes on from there" in log.read_text()
    assert disturbed.result(TARGET).read_bytes() == undisturbed.result(TARGET).read_bytes()


def test_the_same_study_elsewhere_gives_the_same_bytes(undisturbed, tmp_path):
    again = Checkout.at(tmp_path / "again", STUDY)
    again.snakemake(f"results/tiny/{OUTCOMES}")
    assert again.result(TARGET).read_bytes() == undisturbed.result(TARGET).read_bytes()
    first, second = (read_outcomes(checkout.result(OUTCOMES)) for checkout in (undisturbed, again))
    assert first.equals(second)


def test_torch_computes_with_the_threads_of_the_rule(undisturbed):
    assert "1 threads" in read_metadata(undisturbed.result(OUTCOMES))["device"]
