"""Several processes that train one model: each takes its share of every batch; gradients and books are added up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from classwise.errors import Interrupted, UserError


@dataclass(frozen=True)
class Team:
    """This process's place among those that train the model; a team of one asks nobody."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mark(self) -> tuple[int, ...]:
        """What this process adds to a seed, so that no two draw the same; a team of one, and who leads, add nothing."""
        return () if self.leads else (self.rank,)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This process's part of a batch. A batch with fewer rows than processes is everybody's."""
        return rows if len(rows) < self.size else rows[self.rank :: self.size]

    def weight(self, rows: torch.Tensor, own: torch.Tensor) -> float:
        """What this process's mean loss counts, so that the mean over processes is the mean over the batch."""
        return 1.0 if len(own) == len(rows) else len(own) * self.size / len(rows)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            tensor = tensor.clone()
            distributed.all_reduce(tensor)
        return tensor

    def mean(self, value: float) -> float:
        return float(self.sum(torch.tensor(value, dtype=torch.float64))) / self.size

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all get the same answer."""
        return bool(self.sum(torch.tensor(float(flag))) > 0) if self.size > 1 else flag

    def all_of(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def together(self, network: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """The network whose backward pass averages the gradients of all processes."""
        if self.size == 1:
            return network
        places = [device] if device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(network, device_ids=places)


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Team, torch.device]]:
    """The team that torchrun's environment describes, and this process's device. Without it, a team of one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team(), device
        return
    rank, place = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    # gloo also beside nccl: flags and numbers that are agreed on live on the CPU
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield Team(rank, size), device
    # Not after an error: the others would see a broken connection before anybody knows why.
    distributed.destroy_process_group()


def launch(function: Callable[..., None], arguments: tuple, processes: int) -> None:
    """Run `function(*arguments)` in `processes` processes of this machine, as torchrun does; one runs it right here.

    `function` must be importable. An error in one process ends all of them; what it was is raised here.
    """
    if processes == 1:
        function(*arguments)
        return
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # the last is a cluster's "time is nearly up"
    )
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        try:
            interrupted = elastic_launch(config, _run)(function, arguments, told)
        except SignalException as error:
            # The launcher has passed it on to the processes and waited until they were through.
            raise Interrupted("stopped as asked; the checkpoint has all of it") from error
        except ChildFailedError as error:
            if told.exists():
                raise UserError(told.read_text(encoding="utf-8")) from error
            raise
    if any(interrupted.values()):
        raise Interrupted(interrupted[0])


def _run(function: Callable[..., None], arguments: tuple, told: Path) -> str | None:
    """In a process of its own: what it was interrupted with. All are interrupted together, so none has to be killed."""
    try:
        function(*arguments)
    except Interrupted as error:
        return str(error)
    except UserError as error:
        told.write_text(str(error), encoding="utf-8")
        raise
    return None
