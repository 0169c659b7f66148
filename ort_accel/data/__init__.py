"""Samplers that give all processes about the same work in every step. Needs PyTorch only."""

from ort_accel.data.balance import Balance, balance_of
from ort_accel.data.batch_sampler import LoadBalancingDistributedBatchSampler
from ort_accel.data.sampler import LoadBalancingDistributedSampler

__all__ = ["Balance", "LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler", "balance_of"]
