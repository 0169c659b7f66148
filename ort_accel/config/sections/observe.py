"""`observe:` logs, measurements and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Constraint, Row, conflict
from ort_accel.config.values import FilePath, Section
from ort_accel.reporting.report import State

ReportPath = Annotated[FilePath, Field(json_schema_extra={"pattern": r"\.(json|html)$"})]
"""A file of a kind that reports are written in. `_unknown_kind` refuses others, with a way out."""


def _unknown_kind(file: Path | None) -> str | None:
    if file is None or file.suffix in (".json", ".html"):
        return None
    return f"{str(file)!r} ends in neither .json (for machines) nor .html (for people); name one of these"


class ActivationStatistics(Section):
    """Per-module activation statistics, in files that two runs can be compared by."""

    output_dir: Annotated[FilePath, Field(examples=["statistics"]), NO_ROW]
    """The folder to write to."""

    start_step: Annotated[Annotated[int, Field(ge=0)] | None, NO_ROW] = None
    """The first step to record; `null` begins with the first."""

    end_step: Annotated[
        Annotated[int, Field(ge=0)] | None,
        conflict(
            lambda end, start: end is not None and end <= (start or 0),
            "{0} is not after the first step, {1}, so nothing is recorded; write a later step",
            "observe.activation_statistics.start_step",
        ),
        NO_ROW,
    ] = None
    """The step to stop before; `null` records to the end."""

    override_output_dir: Annotated[bool, NO_ROW] = False
    """Write into a folder that is not empty. Without it such a folder is an error."""

    run_on_cpu: Annotated[bool, NO_ROW] = False
    """Compute the statistics on the CPU, to spare GPU memory."""

    bucket_size: Annotated[int, Field(ge=1), NO_ROW] = 1 << 30
    """Elements that are reduced at a time, which bounds the temporary memory."""


class Observe(Section):
    """Logs, measurements and the report."""

    log_level: Annotated[Literal["verbose", "devinfo", "info", "warning", "error", "fatal"], NO_ROW] = "warning"
    """The level of the log. `warning` logs one line a model, with the share of its work that ONNX Runtime runs, and
    real problems; `info` prints the feature table and each phase of set-up, too. These and `error` speak on rank 0
    only; `devinfo` speaks on every rank; `verbose` hides nothing of ONNX Runtime's own log."""

    memory_stats: Annotated[bool, Row("four phases of a step: the first ten steps, then at powers of two")] = False
    """Log memory before and after forward and backward: the first ten steps, then at powers of two."""

    metrics: Annotated[Literal["loggers", "history", "none"], NO_ROW] = "loggers"
    """The places of the engine's figures (`ort/step_time`, `ort/tokens_per_s`, ...) in a Trainer's logs. `loggers`:
    in the progress output and what the Trainer reports to. `history`: in `trainer.state.log_history` too, which
    checkpoints keep, although times of two runs differ. `none`: nowhere but in the report, and without
    `ort/flops_per_s` and `ort/mfu`, so that nothing is counted."""

    activation_statistics: Annotated[
        ActivationStatistics | None,
        Row("a Trainer does it; in a loop of your own use ort_accel.subscribers.StatisticsSubscriber", State.REFUSED),
    ] = None
    """Record per-module activation statistics; `null` records none."""

    report_file: Annotated[
        ReportPath | None,
        Constraint(_unknown_kind),
        Row("written to {0} when training ends; without a Trainer, when the program ends"),
    ] = None
    """Write the report to this file at the end of training: `.json` for machines, `.html` for people, as one page that
    needs no network."""
