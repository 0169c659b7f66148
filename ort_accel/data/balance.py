"""Measures of how evenly the work of each step is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import DistributedSampler

from ort_accel.data.sampler import LoadBalancingDistributedSampler


@dataclass(frozen=True)
class Balance:
    """The work of each process (column) in each step (row)."""

    loads: torch.Tensor

    @property
    def spread(self) -> float:
        """The mean gap between the largest and smallest load of a step, as a share of the mean load."""
        if not self.loads.numel():
            return 0.0
        gaps = self.loads.max(dim=1).values - self.loads.min(dim=1).values
        return float(gaps.mean() / self.loads.mean())

    @property
    def waiting(self) -> float:
        """The share of the processes' time that they wait for the slowest process of each step."""
        if not self.loads.numel():
            return 0.0
        return float(1 - self.loads.mean() / self.loads.max(dim=1).values.mean())


def balance_of(sampler: LoadBalancingDistributedSampler, batch_size: int) -> tuple[Balance, Balance]:
    """Returns the balance of torch's `DistributedSampler` in this epoch, and that of `sampler`."""
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
    for torch_sampler in stock:
        torch_sampler.set_epoch(sampler.epoch)
    before = torch.tensor([list(torch_sampler) for torch_sampler in stock], dtype=torch.long).T
    return _balance(sampler.costs, before, batch_size), _balance(sampler.costs, sampler.rounds(), batch_size)


def _balance(costs: torch.Tensor, rounds: torch.Tensor, batch_size: int) -> Balance:
    starts = range(0, len(rounds), batch_size)
    steps = [costs[rounds[start : start + batch_size]].sum(dim=0) for start in starts]
    return Balance(torch.stack(steps) if steps else costs.new_empty(0, rounds.shape[1]))
