"""`observe.activation_statistics` in a Trainer: from the first step of training to the last."""

from __future__ import annotations

from torch import nn

import ort_accel
from ort_accel.config import Config
from ort_accel.subscribers import StatisticsSubscriber, SubscriberManager


def record_activations(model: nn.Module, config: Config) -> SubscriberManager | None:
    """Begin to write statistics of a model, if the configuration asks for it; end with `unsubscribe`."""
    wish = config.observe.activation_statistics
    if wish is None:
        return None
    subscriber = StatisticsSubscriber(
        wish.output_dir,
        start_step=wish.start_step,
        end_step=wish.end_step,
        override_output_dir=wish.override_output_dir,
        run_on_cpu=wish.run_on_cpu,
        bucket_size=wish.bucket_size,
    )
    if config.engine.enabled:
        ort_accel.report(model).applied("observe.activation_statistics", f"written to {wish.output_dir}")
    return SubscriberManager().subscribe(model, [subscriber])
