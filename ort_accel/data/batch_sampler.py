"""A batch sampler over a load-balancing sampler, with the same number of batches on every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ort_accel.data.epoch_progress import ResumableSampler
from ort_accel.data.sampler import LoadBalancingDistributedSampler
from ort_accel.errors import OrtAccelError

BatchFunction = Callable[[list[int]], Sequence[Sequence[int]]]


class LoadBalancingDistributedBatchSampler(ResumableSampler[list[int]]):
    """Makes batches with a function of yours, such as one that limits tokens, and as many on every process.

    `batch_fn` gets the samples of a process in order and returns its batches. It must be deterministic, since every
    process computes how many batches the others have. If the counts differ, processes with fewer batches repeat some;
    with `drop_last` the others drop their last ones.
    """

    def __init__(
        self, sampler: LoadBalancingDistributedSampler, batch_fn: BatchFunction, drop_last: bool = False
    ) -> None:
        super().__init__()
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._of_epoch: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, with the sampler."""
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state, with the sampler in its epoch."""
        super().load_state_dict(state)
        self.sampler.set_epoch(self._progress.epoch)

    def identity(self) -> dict[str, object]:
        return {**self.sampler.identity(), "drop_last_batches": self.drop_last}

    def _items(self) -> list[list[int]]:
        epoch = self.sampler.epoch
        if self._of_epoch is None or self._of_epoch[0] != epoch:
            self._progress.set_epoch(epoch)
            self._of_epoch = epoch, self._equalized()
        return self._of_epoch[1]

    def _equalized(self) -> list[list[int]]:
        """Returns the batches of this process, as many as every other process has."""
        counts = []
        for rank in range(self.sampler.rules.world_size):
            batches = [list(batch) for batch in self.batch_fn(self.sampler.of_rank(rank))]
            counts.append(len(batches))
            if rank == self.sampler.rank:
                own = batches
        if self.drop_last:
            return own[: min(counts)]
        if max(counts) and not min(counts):
            raise OrtAccelError(
                f"batch_fn made no batch of the samples of rank {counts.index(0)} and {max(counts)} for another, so "
                "there is none to repeat; let it return a smaller batch, or set drop_last"
            )
        return [own[number % len(own)] for number in range(max(counts))]
