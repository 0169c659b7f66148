"""`data:` the batches of a training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row
from ort_accel.config.values import Section
from ort_accel.reporting.report import State


class Packing(Section):
    """Packing of several sequences into each row of a batch."""

    max_length: Annotated[int, Field(ge=2, examples=[1024]), NO_ROW]
    """The most tokens of a row. A longer sample is an error; truncate samples where they are tokenized."""

    flatten: Annotated[bool, NO_ROW] = False
    """Join the rows of a batch into one row, as transformers' `DataCollatorWithFlattening` does. Masks grow with the
    square of a row's length, so that rows side by side take less memory."""


class Data(Section):
    """The batches of a training."""

    packing: Annotated[
        Packing | None,
        Row(
            "a Trainer does it; in a loop of your own use ort_accel.data.PackedDataset and PackingCollator",
            State.REFUSED,
        ),
    ] = None
    """Pack the training set of a causal language model, best-fit, and count `per_device_train_batch_size` in rows;
    `null` leaves batches as they are. Each sequence attends to itself alone. A model in which sequences of a row would
    meet is refused."""
