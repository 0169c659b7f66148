"""`distributed.load_balancing` in a Trainer: samples in an order that accelerate deals out with equal work.

Accelerate shards the batches of whatever sampler a Trainer has, so this one gives the samples of all processes, step by
step and process by process in it. Nothing is sharded twice, and skipping and resuming stay the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from ort_accel.config import Config
from ort_accel.data import LoadBalancingDistributedSampler, balance_of
from ort_accel.errors import OrtAccelError
from ort_accel.reporting import LoadBalance, Report

if TYPE_CHECKING:
    from transformers import Trainer

FEATURE = "distributed.load_balancing.enabled"
KEPT_STEPS = 256
"""Steps of an epoch whose loads the report keeps, at most."""


class StepOrder(Sampler[int]):
    """The samples of all processes in the Trainer's epoch: a step of the first process, then of the second.

    Incomplete last steps are filled with each process's first samples, or left out.
    """

    def __init__(self, sampler: LoadBalancingDistributedSampler, batch_size: int, trainer: Trainer) -> None:
        self.sampler, self.batch_size, self._trainer = sampler, batch_size, trainer

    def __len__(self) -> int:
        return self._turns() * self.sampler.rules.world_size

    def __iter__(self) -> Iterator[int]:
        # From the Trainer's state, since not every way of resuming passes the epoch on to a sampler.
        self.sampler.set_epoch(int(self._trainer.state.epoch or 0))
        rounds = self.sampler.rounds()
        turns = [turn % len(rounds) for turn in range(self._turns())]
        for start in range(0, len(turns), self.batch_size):
            yield from rounds[turns[start : start + self.batch_size]].T.flatten().tolist()

    def _turns(self) -> int:
        """The samples of each process, in whole steps."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return (whole + (bool(rest) and not self.sampler.rules.drop_last)) * self.batch_size


def load_balanced_order(trainer: Trainer, config: Config, dataset: Any) -> Sampler[int] | None:
    """The sampler of a Trainer whose configuration asks for load balancing; None where it keeps its own."""
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
    wish = config.distributed.load_balancing
    sampler = LoadBalancingDistributedSampler(
        lengths_of(samples, trainer),
        float,
        args.world_size,
        args.process_index,
        group_size=wish.group_size,
        seed=wish.seed,
        drop_last=wish.drop_last or args.dataloader_drop_last,
        random_level=wish.random_level,
    )
    split = trainer.accelerator.dataloader_config.split_batches
    return StepOrder(sampler, args.train_batch_size // (args.world_size if split else 1), trainer)


def lengths_of(samples: Any, trainer: Trainer) -> Sequence[int]:
    """The number of tokens of each sample: from its column where the dataset has one, otherwise counted."""
    column = trainer.args.length_column_name
    if column in (getattr(samples, "column_names", None) or ()):
        return [int(length) for length in samples[column]]
    names = getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"]
    try:
        return [len(samples[index][names[0]]) for index in range(len(samples))]
    except (KeyError, TypeError, IndexError) as error:
        raise OrtAccelError(
            f"distributed.load_balancing counts the tokens of each sample's {names[0]!r}, and a sample has none "
            f"({type(error).__name__}: {error}); add a column {column!r} to the dataset, or remove the key"
        ) from error


def record_load_balancing(report: Report, config: Config, loader: Any, world_size: int) -> None:
    """Write into the report what balancing brings; a wish that this training does not obey is an error."""
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
    every = -(-len(after.loads) // KEPT_STEPS) or 1
    report.load_balance = LoadBalance(
        before=before.loads[::every].tolist(),
        after=after.loads[::every].tolist(),
        every=every,
        waiting_before=before.waiting,
        waiting_after=after.waiting,
    )


def _order_of(loader: Any) -> StepOrder | None:
    """The order under a data loader, through the samplers that accelerate put around it."""
    sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    while sampler is not None and not isinstance(sampler, StepOrder):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return sampler
