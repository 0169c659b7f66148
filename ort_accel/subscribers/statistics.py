"""Statistics of every module's activations and gradients, in files by which two runs can be compared.

A run's folder has a folder for each process (`rank-0`) with a file for each step (`step-000000.jsonl`). The file has a
line for each tensor, in the order of the run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ort_accel.errors import OrtAccelError
from ort_accel.observe.logs import rank
from ort_accel.subscribers.base import Site, SubscriberBase


class StatisticsSubscriber(SubscriberBase):
    """Writes shape, norms, extremes, mean, deviation and counts of NaN and infinity of all modules' outputs and of
    their gradients.

    Args:
        output_dir: The folder to write to.
        start_step: The first step to record; from the first if not given.
        end_step: The step to stop before; to the end if not given.
        override_output_dir: Write into a folder that is not empty; without it such a folder is an error.
        run_on_cpu: Compute the statistics on the CPU, to spare GPU memory.
        bucket_size: Elements that are reduced at a time, which bounds the temporary memory.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 1 << 30,
    ) -> None:
        if bucket_size < 1:
            raise OrtAccelError(f"bucket_size is {bucket_size}; it must be at least 1")
        self.start_step, self.end_step = start_step or 0, end_step
        self.run_on_cpu, self.bucket_size = run_on_cpu, bucket_size
        self._folder = _folder_of_process(Path(output_dir), override_output_dir)

    def on_output(self, site: Site, tensor: torch.Tensor) -> None:
        """Record an activation."""
        self._record("forward", site, tensor)

    def on_output_gradient(self, site: Site, gradient: torch.Tensor) -> None:
        """Record a gradient."""
        self._record("backward", site, gradient)

    def _record(self, direction: str, site: Site, tensor: torch.Tensor) -> None:
        if site.step < self.start_step or (self.end_step is not None and site.step >= self.end_step):
            return
        line = {
            "step": site.step,
            "direction": direction,
            "module": site.module,
            "kind": site.kind,
            "tensor": site.tensor,
            "call": site.call,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            **statistics_of(tensor.cpu() if self.run_on_cpu else tensor, self.bucket_size),
        }
        with (self._folder / f"step-{site.step:06d}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def statistics_of(tensor: torch.Tensor, bucket_size: int = 1 << 30) -> dict[str, float | None]:
    """Returns statistics of a tensor's finite values, and the counts of others; `pattern` depends on their order."""
    totals = torch.zeros(4, dtype=torch.float64)
    lowest, highest, nan, inf, finite = float("inf"), float("-inf"), 0, 0, 0
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), bucket_size):
        part = flat[start : start + bucket_size].to(torch.float64)
        nan += int(part.isnan().sum())
        inf += int(part.isinf().sum())
        positions = torch.arange(start, start + len(part), device=part.device, dtype=torch.float64)
        usable = part.isfinite()
        part, positions = part[usable], positions[usable]
        if not len(part):
            continue
        finite += len(part)
        lowest, highest = min(lowest, float(part.min())), max(highest, float(part.max()))
        sums = part.sum(), part.abs().sum(), part.square().sum(), (part * positions.cos()).sum()
        totals += torch.stack(sums).cpu()
    mean, absolute, square, pattern = (totals / max(finite, 1)).tolist()
    return {
        "min": lowest if finite else None,
        "max": highest if finite else None,
        "mean": mean,
        "std": max(square - mean * mean, 0.0) ** 0.5,
        "norm1": absolute * finite,
        "norm2": (square * finite) ** 0.5,
        "pattern": pattern * finite,
        "nan": nan,
        "inf": inf,
    }


def _folder_of_process(output_dir: Path, override: bool) -> Path:
    """Create and empty the folder of this process. Raises if it cannot be written to."""
    folder = output_dir / f"rank-{rank()}"
    try:
        if folder.exists() and any(folder.iterdir()) and not override:
            raise OrtAccelError(
                f"activation statistics: {folder} is not empty; choose another folder, or set override_output_dir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("step-*.jsonl"):
            old.unlink()
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OrtAccelError(f"activation statistics cannot be written to {folder}: {error}") from error
    return folder
