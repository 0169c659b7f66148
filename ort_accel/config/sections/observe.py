"""`observe:` what is logged, measured and written down."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.values import FilePath, Section

ReportPath = Annotated[FilePath, Field(json_schema_extra={"pattern": r"\.(json|html)$"})]
"""A file of a kind that reports are written in. `rules.py` says what is wrong with others."""


class ActivationStatistics(Section):
    """Per-module activation statistics, in files that two runs can be compared by."""

    output_dir: FilePath
    """The folder to write to."""

    start_step: Annotated[int, Field(ge=0)] | None = None
    """The first step to record; `null` begins with the first."""

    end_step: Annotated[int, Field(ge=0)] | None = None
    """The step to stop before; `null` records to the end."""

    override_output_dir: bool = False
    """Write into a folder that is not empty. Without it such a folder is an error."""

    run_on_cpu: bool = False
    """Compute the statistics on the CPU, to spare GPU memory."""

    bucket_size: Annotated[int, Field(ge=1)] = 1 << 30
    """Elements that are reduced at a time, which bounds the temporary memory."""


class Observe(Section):
    """What is logged, measured and written down."""

    log_level: Literal["verbose", "devinfo", "info", "warning", "error", "fatal"] = "warning"
    """How much is said. `warning` logs one line a model, with the share of its work that ONNX Runtime runs, and real
    problems; `info` prints the feature table and each phase of set-up, too. These and `error` speak on rank 0 only;
    `devinfo` speaks on every rank; `verbose` hides nothing of ONNX Runtime's own log."""

    memory_stats: bool = False
    """Log memory before and after forward and backward: the first ten steps, then at powers of two."""

    metrics: Literal["loggers", "history", "none"] = "loggers"
    """Where a Trainer's training log has the engine's figures (`ort/step_time`, `ort/tokens_per_s`, ...). `loggers`:
    in the progress output and what the Trainer reports to. `history`: in `trainer.state.log_history` too, which
    checkpoints keep, although times of two runs differ. `none`: nowhere but in the report."""

    activation_statistics: ActivationStatistics | None = None
    """Record per-module activation statistics; `null` records none."""

    report_file: ReportPath | None = None
    """Write the report to this file at the end of training: `.json` for machines, `.html` for people, as one page that
    needs no network."""
