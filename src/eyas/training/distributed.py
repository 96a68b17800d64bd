"""Several processes that train one draft: how they meet, what they tell one another, and how they end.

torchrun starts them (`torchrun --nproc-per-node 4 -m eyas.cli train ...`). The first writes and speaks for all. Whoever
fails first says why, once: it leaves word in the store that all of them reach, and who merely loses the connection
afterwards looks there. A process that died without a word (killed, out of memory) is a RankLost.
"""

import json
import os
import re
import signal
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from eyas.errors import EyasError, InputError, RankLost
from eyas.progress import mute, say
from eyas.ranks import Place, place_of
from eyas.recipe import TrainSettings
from eyas.run import check_same

Value = TypeVar("Value")
FAILED = "eyas/failed"
"""Where in the store the first to fail leaves word. torchrun keeps the store; else the first process does, and who
comes after its end says the same again."""
LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)
"""What torch's collectives say, as plain RuntimeErrors, of a peer that is gone."""
NEXT = "the same command resumes at the last checkpoint, also with another number of processes"


@dataclass
class Ranks:
    """This process among those that train one draft. Alone, nothing is sent and every answer is its own."""

    place: Place = field(default_factory=Place)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: dist.Store | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set by SIGTERM: the launcher ends all of them, because of a person or because one was lost."""

    @property
    def leads(self) -> bool:
        return self.place.leads

    @property
    def size(self) -> int:
        return self.place.size

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all of them, on the CPU."""
        if self.size == 1:
            return values
        summed = values.cpu().clone()
        dist.all_reduce(summed)
        return summed

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them."""
        return bool(self.sum(torch.tensor([float(flag)])).item() > 0)

    def share(self, value: Value) -> Value:
        """The first one's value."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def send(self, tensor: Tensor, source: int) -> None:
        """What process `source` holds in `tensor` to all others', which are alike in shape and dtype."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)

    def gather(self, value: Value) -> list[Value]:
        """Everyone's, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def check_same(self, facts: dict[str, Any], where: Path) -> None:
        """Raise InputError, on every one of them, at the first fact in which two of them differ."""
        everyone = self.gather(facts)
        for rank, theirs in enumerate(everyone):
            for name in sorted(facts):
                advice = "start all with one command, of one version and the same files"
                check_same(
                    f"{name} of every process", everyone[0][name], theirs[name], Path(f"{where} (rank {rank})"), advice
                )

    def fails(self, error: Exception) -> dict[str, Any]:
        """Leave word of `error`, or read the word of one that failed before. Empty where the store is gone too."""
        assert self.store is not None, "several processes have a store"
        text = (str(error).splitlines() or [""])[0]
        word = {
            "rank": self.place.rank,
            "text": f"{type(error).__name__}: {text}",
            "exit_code": error.exit_code if isinstance(error, EyasError) else None,
        }
        try:
            return json.loads(self.store.compare_set(FAILED, "", json.dumps(word)))
        except RuntimeError:
            return {}


def device_of(settings: TrainSettings, place: Place) -> torch.device:
    """`cuda:LOCAL_RANK` where there are GPUs (`train.device`), else the CPU. Raises InputError for one too few."""
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank >= count:
        raise InputError(
            wanted=f"a GPU for process {place.local_rank} of this machine",
            got=f"{count} of them",
            where="train.device",
            next=f"--nproc-per-node {count}, or --set train.device=cpu" if count else "--set train.device=cpu",
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


@contextmanager
def joined(settings: TrainSettings) -> Generator[Ranks]:
    """This process among those that torchrun started, for as long as they train; alone where it started none.

    Raises InputError for an environment that is not torchrun's, RankLost where one of them does not come, ends or falls
    silent for `rank_timeout_s`; SystemExit where another one has said what is wrong.
    """
    place = place_of(os.environ)
    device = device_of(settings, place)
    if place.size == 1:
        yield Ranks(place, device)
        return
    if not place.leads:
        mute()
        warnings.simplefilter("ignore")  # the first one's are the same
    ranks = meet(place, device, timedelta(seconds=settings.rank_timeout_s))
    try:
        on_sigterm(ranks.stopping)
        yield ranks
    except Exception as error:
        raise last_word(ranks, error) from error
    finally:
        dist.destroy_process_group()


def meet(place: Place, device: torch.device, timeout: timedelta) -> Ranks:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, size = next(iter(rendezvous("env://", place.rank, place.size, timeout=timeout)))
        # torchrun may keep one store over its restarts: addresses of those that died must not be taken for ours
        store = dist.PrefixStore(f"eyas/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set_timeout(timeout)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # ValueError: what rendezvous makes of a bad address
        raise RankLost(
            wanted=f"{place.size} processes that meet at {address}",
            got=str(error).splitlines()[0],
            where=f"rank {place.rank}",
            next=f"start all {place.size} of them: torchrun --nnodes N --nproc-per-node M with N * M = {place.size}",
        ) from error
    return Ranks(place, device, store)


def last_word(ranks: Ranks, error: Exception) -> BaseException:
    """What this process raises in place of `error`: the error itself where it was the first, nothing more to say where
    another one said it, RankLost where the connection broke under it."""
    if is_lost(error):
        text = str(error).splitlines()[0].partition(" This is typically")[0]
        error = RankLost(
            wanted=f"{ranks.size} processes at work",
            got=f"one of them is gone or silent: {text}",
            where=f"rank {ranks.place.rank}",
            next=NEXT,
        )
    first = ranks.fails(error)
    mine = not first or first["rank"] == ranks.place.rank
    if mine:
        return error
    if first["exit_code"] is not None:
        return SystemExit(first["exit_code"])
    if isinstance(error, RankLost):
        error.got = f"rank {first['rank']} failed: {first['text']}"
    return error


def is_lost(error: Exception) -> bool:
    """Whether it says that another process is gone."""
    told = isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
    return isinstance(error, dist.DistError) or told


def on_sigterm(event: threading.Event) -> None:
    """SIGTERM sets `event`, to the process's end: torchrun sends it to those left when one was lost, and they must live
    to say so."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: event.set())


@contextmanager
def stop_requested(ranks: Ranks) -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the step in work is finished and saved; the second interrupts one
    process alone (torchrun passes on what the terminal has sent already, and kills what does not end). SIGTERM, which
    schedulers send, is the same: of several processes from their start on (`on_sigterm`), of one here."""
    stop = ranks.stopping
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and ranks.size == 1:
            raise KeyboardInterrupt
        stop.set()
        say("train: finishing this step and saving it")

    taken = (signal.SIGINT, signal.SIGTERM) if ranks.size == 1 else (signal.SIGINT,)
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
