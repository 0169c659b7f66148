"""How evenly work is spread over processes, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import DistributedSampler

from ort_accel.data.sampler import LoadBalancingDistributedSampler


@dataclass(frozen=True)
class Balance:
    """The work of each process in each step: a row for each step, a column for each process."""

    loads: torch.Tensor

    @property
    def spread(self) -> float:
        """By how much the dearest process of a step exceeds the cheapest, on average, as a share of the mean load."""
        if not self.loads.numel():
            return 0.0
        gaps = self.loads.max(dim=1).values - self.loads.min(dim=1).values
        return float(gaps.mean() / self.loads.mean())

    @property
    def waiting(self) -> float:
        """The share of all processes' time spent waiting for the slowest of each step."""
        if not self.loads.numel():
            return 0.0
        return float(1 - self.loads.mean() / self.loads.max(dim=1).values.mean())


def balance_of(sampler: LoadBalancingDistributedSampler, batch_size: int) -> tuple[Balance, Balance]:
    """The balance that torch's `DistributedSampler` would give in this epoch, and the one that `sampler` gives."""
    rules = sampler.rules
    stock: list[DistributedSampler[int]] = [
        DistributedSampler(
            range(len(sampler.costs)),  # type: ignore[arg-type]
            rules.world_size,
            rank,
            shuffle=rules.shuffle,
            seed=rules.seed,
            drop_last=rules.drop_last,
        )
        for rank in range(rules.world_size)
    ]
    for one in stock:
        one.set_epoch(sampler.epoch)
    before = torch.tensor([list(one) for one in stock], dtype=torch.long).T
    return _balance(sampler.costs, before, batch_size), _balance(sampler.costs, sampler.rounds(), batch_size)


def _balance(costs: torch.Tensor, rounds: torch.Tensor, batch_size: int) -> Balance:
    starts = range(0, len(rounds), batch_size)
    steps = [costs[rounds[start : start + batch_size]].sum(dim=0) for start in starts]
    return Balance(torch.stack(steps) if steps else costs.new_empty(0, rounds.shape[1]))
