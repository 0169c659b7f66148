"""The assignment of an epoch's samples to processes, which every process computes alike."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingRules:
    """The settings of an assignment, besides the costs and the epoch."""

    world_size: int
    shuffle: bool = True
    group_size: int | None = None
    seed: int = 0
    drop_last: bool = False
    random_level: float = 0.0


def samples_per_process(samples: int, rules: SamplingRules) -> int:
    """Returns how many samples of an epoch each process gets."""
    whole, rest = divmod(samples, rules.world_size)
    return whole if rules.drop_last or not rest else whole + 1


def assign_samples(costs: torch.Tensor, rules: SamplingRules, epoch: int) -> torch.Tensor:
    """Returns the sample of each round (row) and process (column). The samples of a round cost about the same.

    The time is O(n log n).
    """
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
