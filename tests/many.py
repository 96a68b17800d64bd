"""Several processes that train one draft, started as torchrun starts them, but their imports paid for once."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from eyas.cli import main
from eyas.training import optimise
from eyas.training.loop import Trainer
from eyas.training.loss import Batch, Sums
from eyas.training.optimise import trained
from eyas.training.shards import whole_tensor

SERVER = multiprocessing.get_context("forkserver")
"""It imports once and has no threads yet when it forks; a fork of the test's own process would inherit torch's."""
SERVER.set_forkserver_preload(["eyas.cli", "eyas.training.loop", "torch.distributed.tensor.parallel"])


@dataclass(frozen=True)
class Ended:
    """How one of the processes ended."""

    code: int
    out: str
    err: str


def together(folder: Path, size: int, work: Callable[..., None], *args: Any, seconds: float = 60) -> list[Ended]:
    """How `size` processes at `work(*args)` end, their output in `folder`; one that does not end is killed, and seen by
    its code. This process keeps their store, as torchrun does."""
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    processes: list[BaseProcess] = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = SERVER.Process(target=_child, args=(folder, rank, told | place, work, args))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [
        Ended(process.exitcode or 0, (folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text())
        for rank, process in enumerate(processes)
    ]


def _child(folder: Path, rank: int, environment: dict[str, str], work: Callable[..., None], args: Any) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= environment
    torch.set_num_threads(1)
    work(*args)
    sys.stdout.flush()


# What the processes do --------------------------------------------------------------------------------------------


def command(argv: list[str]) -> None:
    main(argv)


def main_alone(argv: list[str]) -> None:
    """The command by this process."""
    try:
        main(argv)
    except SystemExit as end:
        assert not end.code, end.code


def command_of_ones_own(argv: list[str]) -> None:
    """The second process was started with another learning rate."""
    main([*argv, "--learning-rate=0.5"] if os.environ["RANK"] == "1" else argv)


def command_that_overflows(argv: list[str], sample: str) -> None:
    """From the fifth step on the loss of `sample` has a gradient without end."""
    compute = Trainer.compute

    def overflowing(trainer: Trainer, batch: Batch, weights: Sequence[float]) -> tuple[torch.Tensor, Sums]:
        loss, sums = compute(trainer, batch, weights)
        if sample in batch.samples and trainer.step >= 4:
            loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss * 1.0, sums
        return loss, sums

    Trainer.compute = overflowing
    main(argv)


def command_that_keeps_gradients(argv: list[str], file: Path) -> None:
    """The summed gradients of every step, before they are clipped, as the first process has them."""
    kept: list[dict[str, torch.Tensor]] = []
    keep_gradients(kept)
    try:
        main(argv)
    finally:
        if os.environ["RANK"] == "0":
            torch.save(kept, file)


def keep_gradients(kept: list[dict[str, torch.Tensor]]) -> Callable[[Trainer], float]:
    """Patch `Trainer.clip`; returns what it was."""
    clip = Trainer.clip

    def keeping(trainer: Trainer) -> float:
        named = trained(trainer.draft)
        kept.append({name: whole_tensor(p.grad).clone() for name, p in named.items() if p.grad is not None})
        return clip(trainer)

    Trainer.clip = keeping
    return clip


def command_that_counts_iterations(argv: list[str], folder: Path) -> None:
    """The shapes that Muon's iteration was given in this process, in `iterations-RANK.json`."""
    shapes: list[list[int]] = []
    iterate = optimise.orthogonal

    def counting(matrix: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(list(matrix.shape))
        return iterate(matrix, *args)

    optimise.orthogonal = counting
    try:
        main(argv)
    finally:
        (folder / f"iterations-{os.environ['RANK']}.json").write_text(json.dumps(shapes))


def command_with(argv: list[str], rank: int, step: int, act: Callable[[], None]) -> None:
    """In process `rank`, `act` in the middle of optimiser step `step` + 1."""
    summed = Trainer.summed

    def acting(trainer: Trainer, *args: Any) -> Any:
        if trainer.ranks.place.rank == rank and trainer.step == step:
            act()
        return summed(trainer, *args)

    Trainer.summed = acting
    main(argv)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def stumble() -> None:
    raise ZeroDivisionError("a fault of our own")
