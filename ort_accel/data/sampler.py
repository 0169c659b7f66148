"""A distributed sampler that gives all processes samples of about the same cost in every step."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ort_accel.data.epoch_progress import ResumableSampler
from ort_accel.errors import OrtAccelError


class SizedDataset(Protocol):
    """A dataset with a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class SamplingRules:
    """The settings of an assignment, besides the costs and the epoch."""

    world_size: int
    shuffle: bool = True
    group_size: int | None = None
    seed: int = 0
    drop_last: bool = False
    random_level: float = 0.0


class LoadBalancingDistributedSampler(ResumableSampler[int]):
    """Assigns samples to processes so that all of them have about the same work in each step.

    Samples are sorted by their cost, and of each `world_size` neighbours every process gets one. Each process gets the
    same number of samples in an epoch: a few are repeated if necessary, or left out with `drop_last`. The order depends
    only on `seed` and epoch, so processes need not communicate. Call `set_epoch` before each epoch, as for torch's
    `DistributedSampler`.
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
        """Compute the cost of each sample.

        Args:
            dataset: The dataset to sample from.
            complexity_fn: Returns the cost of a sample, in any unit.
            world_size: The number of processes; that of torch.distributed by default.
            rank: The number of this process; that of torch.distributed by default.
            shuffle: Use a new order in each epoch; otherwise the order of rising cost.
            group_size: Sort only within random groups of so many samples, rounded up to whole rounds. The order is
                then more random.
            seed: The seed of the order, which must be equal on every process.
            drop_last: Leave out samples that do not fill a round, instead of repeating some.
            random_level: The noise added to the costs, as a share of their range; 0 balances best.
        """
        super().__init__()
        world_size, rank = _distributed_defaults(world_size, rank)
        _check(world_size, rank, group_size, random_level)
        self.rules = SamplingRules(world_size, shuffle, group_size, seed, drop_last, random_level)
        self.rank = rank
        self.costs = _costs(dataset, complexity_fn)
        self._of_epoch: tuple[int, torch.Tensor] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._progress.epoch

    def __len__(self) -> int:
        """Returns the number of samples of this process in an epoch."""
        return samples_per_process(len(self.costs), self.rules)

    def _items(self) -> list[int]:
        return self.of_rank(self.rank)

    def rounds(self) -> torch.Tensor:
        """Returns the samples of this epoch: a row for each round, a column for each process."""
        if self._of_epoch is None or self._of_epoch[0] != self.epoch:
            self._of_epoch = self.epoch, assign_samples(self.costs, self.rules, self.epoch)
        return self._of_epoch[1]

    def of_rank(self, rank: int) -> list[int]:
        """Returns the samples of a process in this epoch, in order."""
        indices: list[int] = self.rounds()[:, rank].tolist()
        return indices

    def identity(self) -> dict[str, object]:
        """Returns the settings that must be equal for a state to mean the same samples."""
        costs = hashlib.sha256(self.costs.numpy().tobytes()).hexdigest()[:16]
        return {**asdict(self.rules), "samples": len(self.costs), "costs": costs}


def _distributed_defaults(world_size: int | None, rank: int | None) -> tuple[int, int]:
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


def samples_per_process(samples: int, rules: SamplingRules) -> int:
    """Returns how many samples of an epoch each process gets."""
    whole, rest = divmod(samples, rules.world_size)
    return whole if rules.drop_last or not rest else whole + 1


def assign_samples(costs: torch.Tensor, rules: SamplingRules, epoch: int) -> torch.Tensor:
    """Returns the sample of each round (row) and process (column). The samples of a round cost about the same."""
    generator = torch.Generator().manual_seed(random.Random(f"{rules.seed}/{epoch}").getrandbits(63))
    samples = _whole_rounds(len(costs), rules, generator)
    order = _order_by_cost(costs[samples], rules, generator)
    rounds = samples[order].view(-1, rules.world_size)
    if not rules.shuffle:
        # Every second round is reversed. Otherwise the last process would get the largest cost of every round.
        rounds[1::2] = rounds[1::2].flip(1)
        return rounds
    within = torch.rand(rounds.shape, generator=generator).argsort(dim=1)
    return rounds.gather(1, within)[torch.randperm(len(rounds), generator=generator)]


def _whole_rounds(count: int, rules: SamplingRules, generator: torch.Generator) -> torch.Tensor:
    """Returns all samples, in order or shuffled, with the fewest left out or repeated that fill every round."""
    samples = torch.randperm(count, generator=generator) if rules.shuffle else torch.arange(count)
    wanted = samples_per_process(count, rules) * rules.world_size
    return samples[torch.arange(wanted) % max(count, 1)]


def _order_by_cost(costs: torch.Tensor, rules: SamplingRules, generator: torch.Generator) -> torch.Tensor:
    """Returns positions by rising cost, over all samples or within each group."""
    if rules.random_level and len(costs):
        spread = costs.max() - costs.min()
        costs = costs + torch.rand(len(costs), generator=generator, dtype=costs.dtype) * spread * rules.random_level
    order = costs.argsort(stable=True)
    if rules.group_size is None:
        return order
    # A group holds whole rounds, so that no round spans two groups.
    size = -(-rules.group_size // rules.world_size) * rules.world_size
    return order[(order // size).argsort(stable=True)]
