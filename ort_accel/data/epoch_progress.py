"""The position of a sampler in its epoch, from which it can resume. Each sampler counts its own items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import Sampler

from ort_accel.errors import OrtAccelError

Item = TypeVar("Item")


class EpochProgress:
    """The epoch, and the number of its items that were handed out."""

    def __init__(self) -> None:
        self.epoch = 0
        self.done = 0
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The epoch that is being resumed continues at its position."""
        if epoch != self.epoch:
            self.epoch, self.done, self._resumed = epoch, 0, False

    def remaining(self, items: Sequence[Item]) -> Iterator[Item]:
        """Yields the items that remain after a resumption, otherwise all items, and counts them."""
        if not self._resumed:
            self.done = 0
        self._resumed = False
        for item in items[self.done :]:
            self.done += 1
            yield item

    def state_dict(self, identity: Mapping[str, object]) -> dict[str, object]:
        """Returns a state for `load_state_dict`, which will require the same `identity`."""
        return {"epoch": self.epoch, "done": self.done, **identity}

    def load_state_dict(self, state: Mapping[str, Any], identity: Mapping[str, object]) -> None:
        """Continue from a state. Raises if it belongs to other samples or rules."""
        missing = {"epoch", "done", *identity} - set(state)
        if missing:
            raise OrtAccelError(f"this is no state of a load-balancing sampler: it lacks {', '.join(sorted(missing))}")
        other = [f"{key} was {state[key]!r} and is {value!r}" for key, value in identity.items() if state[key] != value]
        if other:
            raise OrtAccelError(
                f"the state is of another deal of samples: {'; '.join(other)}; "
                "build the sampler as it was, or start the epoch anew without its state"
            )
        self.epoch, self.done, self._resumed = state["epoch"], state["done"], True


class ResumableSampler(Sampler[Item]):
    """A sampler that can resume within an epoch. Its items are samples, or batches of them."""

    def __init__(self) -> None:
        self._progress = EpochProgress()

    def _items(self) -> Sequence[Item]:
        """Returns the items of this process in this epoch."""
        raise NotImplementedError

    def identity(self) -> dict[str, object]:
        """Returns the settings that must be equal for a state to mean the same items."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. A sampler that was resumed in this epoch continues from its state."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns the number of items of each process in this epoch."""
        return len(self._items())

    def __iter__(self) -> Iterator[Item]:
        return self._progress.remaining(self._items())

    def state_dict(self) -> dict[str, object]:
        """Returns the position in the epoch, counted in items, as plain data."""
        return self._progress.state_dict(self.identity())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state: the next iteration gives the remaining items of its epoch."""
        self._progress.load_state_dict(state, self.identity())
