"""Batches of any make-up over a load-balancing sampler, as many on every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Sampler

from ort_accel.data.resume import Progress
from ort_accel.data.sampler import LoadBalancingDistributedSampler
from ort_accel.errors import OrtAccelError

BatchFunction = Callable[[list[int]], Sequence[Sequence[int]]]


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Makes batches with a function of your own (by a number of tokens, say), equally many on every process.

    `batch_fn` gets the samples of a process in order and returns its batches. It must give the same answer for the same
    samples: every process works out how many batches the others have. Where the counts differ, processes with
    fewer repeat some of theirs, or with `drop_last` the others leave out their last.
    """

    def __init__(
        self, sampler: LoadBalancingDistributedSampler, batch_fn: BatchFunction, drop_last: bool = False
    ) -> None:
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._progress = Progress()
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. A sampler that was resumed in this epoch goes on where it was."""
        self._progress.set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """The batches of each process in this epoch."""
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return self._progress.over(self._batches())

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, counted in batches that were handed out; plain data."""
        return self._progress.state_dict(self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next iteration gives the batches that were left of that epoch."""
        self._progress.load_state_dict(state, self._identity())
        self.sampler.set_epoch(self._progress.epoch)

    def _identity(self) -> dict[str, Any]:
        return {**self.sampler.identity(), "drop_last_batches": self.drop_last}

    def _batches(self) -> list[list[int]]:
        epoch = self.sampler.epoch
        if self._made is None or self._made[0] != epoch:
            self._progress.set_epoch(epoch)
            self._made = epoch, self._evened()
        return self._made[1]

    def _evened(self) -> list[list[int]]:
        """The batches of this process, as many as all others have."""
        ranks = range(self.sampler.rules.world_size)
        counts = []
        for rank in ranks:
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
