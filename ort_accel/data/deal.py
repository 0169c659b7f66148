"""Dealing the samples of an epoch: which process gets which, in what order. The same answer on every process."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rules:
    """What a deal depends on, besides the costs and the epoch."""

    world_size: int
    shuffle: bool = True
    group_size: int | None = None
    seed: int = 0
    drop_last: bool = False
    random_level: float = 0.0


def rounds_in(samples: int, rules: Rules) -> int:
    """How many samples each process gets."""
    whole, rest = divmod(samples, rules.world_size)
    return whole if rules.drop_last or not rest else whole + 1


def deal(costs: torch.Tensor, rules: Rules, epoch: int) -> torch.Tensor:
    """The sample of each round (row) and process (column). The samples of a round cost about the same.

    Takes one sort and a few permutations: O(n log n).
    """
    generator = torch.Generator().manual_seed(random.Random(f"{rules.seed}/{epoch}").getrandbits(63))
    samples = _evened(len(costs), rules, generator)
    order = _sorted(costs[samples], rules, generator)
    rounds = samples[order].view(-1, rules.world_size)
    if not rules.shuffle:
        # Falling and rising rounds in turn, or the last process would have the dearest sample of every round.
        rounds[1::2] = rounds[1::2].flip(1)
        return rounds
    within = torch.rand(rounds.shape, generator=generator).argsort(dim=1)
    return rounds.gather(1, within)[torch.randperm(len(rounds), generator=generator)]


def _evened(count: int, rules: Rules, generator: torch.Generator) -> torch.Tensor:
    """All samples in order or at random, with as few as can be left out or repeated to fill every round."""
    samples = torch.randperm(count, generator=generator) if rules.shuffle else torch.arange(count)
    wanted = rounds_in(count, rules) * rules.world_size
    return samples[torch.arange(wanted) % max(count, 1)]


def _sorted(costs: torch.Tensor, rules: Rules, generator: torch.Generator) -> torch.Tensor:
    """Positions by rising cost, in the whole or group by group."""
    if rules.random_level and len(costs):
        spread = costs.max() - costs.min()
        costs = costs + torch.rand(len(costs), generator=generator, dtype=costs.dtype) * spread * rules.random_level
    order = costs.argsort(stable=True)
    if rules.group_size is None:
        return order
    # A round lies in one group, so a group holds whole rounds.
    size = -(-rules.group_size // rules.world_size) * rules.world_size
    return order[(order // size).argsort(stable=True)]
