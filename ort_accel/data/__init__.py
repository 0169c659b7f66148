"""Samplers that give all processes about the same work in every step, and packing. Needs PyTorch only."""

from ort_accel.data.balance import Balance, balance_of
from ort_accel.data.batch_sampler import LoadBalancingDistributedBatchSampler
from ort_accel.data.packing import PackedDataset, PackingBatchSampler, PackingCollator, pack_best_fit
from ort_accel.data.sampler import LoadBalancingDistributedSampler

__all__ = [
    "Balance",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "PackedDataset",
    "PackingBatchSampler",
    "PackingCollator",
    "balance_of",
    "pack_best_fit",
]
