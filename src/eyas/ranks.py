"""Which of several processes this is, as torchrun tells each of them in its environment. Torch-free."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from eyas.errors import InputError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a process needs in order to meet the others; LOCAL_RANK says which device is its own."""


@dataclass(frozen=True)
class Place:
    """One process of `size`, alone by default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number among those of its machine."""
    machine: int = 0

    @property
    def leads(self) -> bool:
        """Whether it speaks, and writes, for all."""
        return self.rank == 0


def place_of(environment: Mapping[str, str]) -> Place:
    """The place that `environment` names; alone where it names no other process.

    Raises InputError where several processes are meant and one of them could not find the others.
    """
    told = {name: environment[name] for name in NEEDED if environment.get(name)}
    if told.get("WORLD_SIZE", "1") == "1":
        return Place(local_rank=int(environment.get("LOCAL_RANK") or 0) if "WORLD_SIZE" in told else 0)
    if missing := [name for name in NEEDED if name not in told]:
        raise _unplaced(f"no {', no '.join(missing)}", told)
    try:
        rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK") or rank)
        machine = int(environment.get("GROUP_RANK") or 0)
    except ValueError as error:
        raise _unplaced(str(error), told) from error
    if not 0 <= rank < size:
        raise _unplaced(f"rank {rank} of {size}", told)
    return Place(rank, size, local_rank, machine)


def refuse_several(environment: Mapping[str, str], command: str) -> None:
    """Raise InputError where torchrun started several processes of a command that is one."""
    place = place_of(environment)
    if place.size > 1:
        raise InputError(
            wanted=f"one process of `eyas {command}`: only `eyas train` is shared among several",
            got=f"{place.size} of them",
            where="torchrun",
            next=f"eyas {command}, without torchrun",
        )


def _unplaced(got: str, told: Mapping[str, str]) -> InputError:
    command = " ".join(sys.argv[1:]) or "train --captures CAPTURES --out DRAFT"
    return InputError(
        wanted=f"{', '.join(NEEDED)} in the environment of every process, as torchrun sets them",
        got=got,
        where="the environment: " + ", ".join(f"{name}={value}" for name, value in told.items()),
        next=f"torchrun --nproc-per-node {told.get('WORLD_SIZE', '2')} -m eyas.cli {command}",
    )
