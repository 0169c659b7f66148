"""Watching a model's modules at work, on ONNX Runtime as in eager PyTorch."""

from ort_accel.subscribers.base import Site, SubscriberBase, SubscriberManager
from ort_accel.subscribers.statistics import StatisticsSubscriber
from ort_accel.subscribers.zero_offload import ZeROOffloadSubscriber

__all__ = ["Site", "StatisticsSubscriber", "SubscriberBase", "SubscriberManager", "ZeROOffloadSubscriber"]
