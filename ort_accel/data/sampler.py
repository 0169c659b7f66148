"""A distributed sampler that gives every process samples of about the same cost at the same time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ort_accel.data.deal import Rules, deal, rounds_in
from ort_accel.data.resume import Progress
from ort_accel.errors import OrtAccelError


class SizedDataset(Protocol):
    """A dataset with a length, whose samples have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LoadBalancingDistributedSampler(Sampler[int]):
    """Deals samples to processes so that in each step all of them have about the same work.

    Samples are sorted by what they cost; of each `world_size` neighbours every process gets one. Each process goes
    through the same number of samples in an epoch, and no sample is left out; where they do not come out even, a few
    are repeated, or with `drop_last` a few are left out. Everything depends on `seed` and epoch only, so that all
    processes agree without a word: call `set_epoch` before each epoch, as for torch's `DistributedSampler`.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        complexity_fn: Callable[[Any], float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
    ) -> None:
        """Ask for the cost of each sample once, here.

        Args:
            dataset: What is sampled from.
            complexity_fn: What a sample costs, in any unit.
            world_size: The number of processes; torch.distributed's if not given.
            rank: The number of this process; torch.distributed's if not given.
            shuffle: A new order in each epoch; otherwise from cheap to dear.
            group_size: Sort within random groups of so many samples (rounded up to whole rounds), which leaves more
                to chance.
            seed: The same on every process.
            drop_last: Leave out the samples that do not fill a round, instead of repeating some.
            random_level: Noise added to the costs, as a share of their range: 0 balances best.
        """
        world_size, rank = _place(world_size, rank)
        _check(world_size, rank, group_size, random_level)
        self.rules = Rules(world_size, shuffle, group_size, seed, drop_last, random_level)
        self.rank = rank
        self.costs = _costs(dataset, complexity_fn)
        self._progress = Progress()
        self._dealt: tuple[int, torch.Tensor] | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose samples come next, or are coming."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. A sampler that was resumed in this epoch goes on where it was."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """The samples of this process in a whole epoch."""
        return rounds_in(len(self.costs), self.rules)

    def __iter__(self) -> Iterator[int]:
        return self._progress.over(self.of_rank(self.rank))

    def rounds(self) -> torch.Tensor:
        """The samples of this epoch: a row for each turn, a column for each process."""
        if self._dealt is None or self._dealt[0] != self.epoch:
            self._dealt = self.epoch, deal(self.costs, self.rules, self.epoch)
        return self._dealt[1]

    def of_rank(self, rank: int) -> list[int]:
        """The samples of a process in this epoch, in order."""
        indices: list[int] = self.rounds()[:, rank].tolist()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, counted in samples that were handed out; plain data."""
        return self._progress.state_dict(self.identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next iteration gives what was left of that epoch."""
        self._progress.load_state_dict(state, self.identity())

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same samples."""
        costs = hashlib.sha256(self.costs.numpy().tobytes()).hexdigest()[:16]
        return {**asdict(self.rules), "samples": len(self.costs), "costs": costs}


def _place(world_size: int | None, rank: int | None) -> tuple[int, int]:
    if world_size is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OrtAccelError(
                "a load-balancing sampler needs world_size and rank: torch.distributed is not set up, so they cannot "
                "be asked for"
            )
        world_size = dist.get_world_size() if world_size is None else world_size
        rank = dist.get_rank() if rank is None else rank
    return world_size, rank


def _check(world_size: int, rank: int, group_size: int | None, random_level: float) -> None:
    if world_size < 1:
        raise OrtAccelError(f"world_size is {world_size}; it must be at least 1")
    if not 0 <= rank < world_size:
        raise OrtAccelError(f"rank is {rank}; with {world_size} processes it must be between 0 and {world_size - 1}")
    if group_size is not None and group_size < 1:
        raise OrtAccelError(f"group_size is {group_size}; it must be at least 1, or None to sort all samples")
    if not 0.0 <= random_level <= 1.0:
        raise OrtAccelError(f"random_level is {random_level}; it must be between 0 and 1")


def _costs(dataset: SizedDataset, complexity_fn: Callable[[Any], float]) -> torch.Tensor:
    costs = [float(complexity_fn(dataset[index])) for index in range(len(dataset))]
    wrong = next((index for index, cost in enumerate(costs) if not math.isfinite(cost)), None)
    if wrong is not None:
        raise OrtAccelError(f"complexity_fn gave {costs[wrong]} for sample {wrong}; a cost must be a finite number")
    return torch.tensor(costs, dtype=torch.float64)
