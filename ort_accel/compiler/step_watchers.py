"""Objects that follow the steps of a model: its memory, the density of batches, and the report's file."""

from __future__ import annotations

from ort_accel.compiler.lowering import Lowering
from ort_accel.compiler.settings import Settings
from ort_accel.memory.malloc_settings import disable_trimming, trim_heap
from ort_accel.memory.step_peaks import StepMemoryWatch
from ort_accel.observe.density import DensityInspector
from ort_accel.observe.logs import speaks
from ort_accel.observe.report_file import ReportFile
from ort_accel.reporting.report import Report


class CompilerMemory:
    """Returns to the system what compiling leaves behind: at once, and once more before the next step.

    No later step needs blocks of these sizes. Where the C library frees by itself, there is nothing to do.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_kept = not settings.place.is_cuda and disable_trimming()
        self._is_due = False

    def trim(self) -> None:
        """Return memory now, and once more before the next step."""
        self._is_due = True
        self._return()

    def before_step(self) -> None:
        """Called before each step."""
        if self._is_due:
            self._is_due = False
            self._return()

    def _return(self) -> None:
        if self._is_kept:
            trim_heap()


def memory_watch(settings: Settings, report: Report, lowering: Lowering) -> StepMemoryWatch | None:
    """Returns the watch on the memory of steps; None unless memory is reported or limited."""
    is_wished, is_limited = settings.config.observe.memory_stats, settings.config.memory.frugal
    if not is_wished and not is_limited:
        return None
    prints = is_wished and speaks(settings.config.observe.log_level)
    return StepMemoryWatch(report, prints, lowering.before_segments if is_limited else None)


def report_file(settings: Settings, report: Report) -> ReportFile | None:
    """Returns the file of `observe.report_file`; None if none is named."""
    path = settings.config.observe.report_file
    return None if path is None else ReportFile(report, path)


def density_inspector(settings: Settings, report: Report) -> DensityInspector | None:
    """Returns the inspector of batches; None unless `density.inspect` asks for it."""
    density = settings.config.density
    if not density.inspect:
        return None
    return DensityInspector(report, density.inspect_every, settings.config.observe.log_level)
