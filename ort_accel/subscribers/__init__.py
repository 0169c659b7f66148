"""Subscribers to the modules of a model, on ONNX Runtime and in eager PyTorch."""

from ort_accel.subscribers.base import Site, SubscriberBase, SubscriberManager
from ort_accel.subscribers.statistics import StatisticsSubscriber
from ort_accel.subscribers.zero_offload import ZeROOffloadSubscriber

__all__ = ["Site", "StatisticsSubscriber", "SubscriberBase", "SubscriberManager", "ZeROOffloadSubscriber"]
