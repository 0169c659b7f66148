"""Where a sampler is in its epoch, and going on from there. Both samplers count their own items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ort_accel.errors import OrtAccelError

Item = TypeVar("Item")


class Progress:
    """The epoch, and how many items of it were handed out."""

    def __init__(self) -> None:
        self.epoch = 0
        self.done = 0
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. One that is being resumed goes on where it was."""
        if epoch != self.epoch:
            self.epoch, self.done, self._resumed = epoch, 0, False

    def over(self, items: Sequence[Item]) -> Iterator[Item]:
        """The items that are left after a resumption, otherwise all of them; counts them as they are handed out."""
        if not self._resumed:
            self.done = 0
        self._resumed = False
        for item in items[self.done :]:
            self.done += 1
            yield item

    def state_dict(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """What `load_state_dict` takes; `identity` is what must be the same then."""
        return {"epoch": self.epoch, "done": self.done, **identity}

    def load_state_dict(self, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Go on from a state, if it is of the same samples dealt by the same rules."""
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
