"""`distributed.load_balancing` in a Trainer: an order of samples that accelerate shards into equal work.

Accelerate shards the batches of a Trainer's sampler. So this sampler gives the samples of all processes: step by step,
and in each step process by process. Skipping and resuming stay the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from ort_accel.config import Config
from ort_accel.data import LoadBalancingDistributedSampler, balance_of
from ort_accel.errors import OrtAccelError
from ort_accel.reporting.batches import LoadBalance
from ort_accel.reporting.report import Report

if TYPE_CHECKING:
    from transformers import Trainer

FEATURE = "distributed.load_balancing.enabled"
MAX_REPORTED_STEPS = 256
"""The most steps of an epoch whose loads are in the report."""


class StepOrder(Sampler[int]):
    """The samples of all processes in the Trainer's epoch: each step has those of the first process, then the second.

    An incomplete last step is filled with each process's first samples, or left out.
    """

    def __init__(self, sampler: LoadBalancingDistributedSampler, batch_size: int, trainer: Trainer) -> None:
        self.sampler, self.batch_size, self._trainer = sampler, batch_size, trainer

    def __len__(self) -> int:
        return self._padded_rounds() * self.sampler.rules.world_size

    def __iter__(self) -> Iterator[int]:
        # The epoch is the Trainer's, since resuming does not always pass it to the sampler.
        self.sampler.set_epoch(int(self._trainer.state.epoch or 0))
        rounds = self.sampler.rounds()
        indices = [index % len(rounds) for index in range(self._padded_rounds())]
        for start in range(0, len(indices), self.batch_size):
            yield from rounds[indices[start : start + self.batch_size]].T.flatten().tolist()

    def _padded_rounds(self) -> int:
        """Returns the number of rounds in whole steps."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return (whole + (bool(rest) and not self.sampler.rules.drop_last)) * self.batch_size


def load_balanced_order(trainer: Trainer, config: Config, dataset: Any) -> Sampler[int] | None:
    """Returns the sampler for a configuration with load balancing; None if the Trainer keeps its own."""
    args = trainer.args
    if not config.distributed.load_balancing.enabled or args.world_size == 1:
        return None
    samples = trainer.train_dataset if dataset is None else dataset
    if not hasattr(samples, "__len__"):
        raise OrtAccelError(
            "distributed.load_balancing needs a dataset with a length, and the training set is a "
            f"{type(samples).__name__}; give one with samples by number, or remove the key"
        )
    if args.train_sampling_strategy != "random":
        raise OrtAccelError(
            f"distributed.load_balancing and train_sampling_strategy={args.train_sampling_strategy!r} both decide the "
            "order of samples; remove one of them"
        )
    settings = config.distributed.load_balancing
    sampler = LoadBalancingDistributedSampler(
        lengths_of(samples, trainer, "distributed.load_balancing"),
        float,
        args.world_size,
        args.process_index,
        group_size=settings.group_size,
        seed=settings.seed,
        drop_last=settings.drop_last or args.dataloader_drop_last,
        random_level=settings.random_level,
    )
    split = trainer.accelerator.dataloader_config.split_batches
    return StepOrder(sampler, args.train_batch_size // (args.world_size if split else 1), trainer)


def lengths_of(samples: Any, trainer: Trainer, key: str) -> Sequence[int]:
    """Returns the number of tokens of each sample, from the length column if the dataset has one.

    `key` of the configuration needs them.
    """
    column = trainer.args.length_column_name
    if column in (getattr(samples, "column_names", None) or ()):
        return [int(length) for length in samples[column]]
    names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    try:
        return [len(samples[index][names[0]]) for index in range(len(samples))]
    except (KeyError, TypeError, IndexError) as error:
        raise OrtAccelError(
            f"{key} counts the tokens of each sample's {names[0]!r}, and a sample has none "
            f"({type(error).__name__}: {error}); add a column {column!r} to the dataset, or remove the key"
        ) from error


def record_load_balancing(report: Report, config: Config, loader: object, world_size: int) -> None:
    """Report the effect of load balancing. Raises if it is configured and the data loader has another sampler."""
    if not config.distributed.load_balancing.enabled:
        return
    if world_size == 1:
        report.refused(FEATURE, "one process has nobody to balance with")
        return
    order = _order_of(loader)
    if order is None:
        raise OrtAccelError(
            "distributed.load_balancing is on, but the training data loader has another sampler; use ORTTrainer, which "
            "puts the sampler in, and leave its get_train_dataloader as it is, or remove the key"
        )
    before, after = balance_of(order.sampler, order.batch_size)
    report.applied(
        FEATURE,
        f"processes wait {after.waiting:.1%} of the time for the one with the most tokens in a step, "
        f"{before.waiting:.1%} without",
    )
    every = -(-len(after.loads) // MAX_REPORTED_STEPS) or 1
    report.load_balance = LoadBalance(
        before=before.loads[::every].tolist(),
        after=after.loads[::every].tolist(),
        every=every,
        waiting_before=before.waiting,
        waiting_after=after.waiting,
    )


def _order_of(loader: object) -> StepOrder | None:
    """Returns the `StepOrder` inside the samplers of a data loader."""
    sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    while sampler is not None and not isinstance(sampler, StepOrder):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler
