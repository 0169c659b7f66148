"""The background process that compiles clusters and graphs: `python -m ort_accel.generated.worker FOLDER PARENT`.

It reads `request.json` in the folder, and writes `kernels.cpp`, `kernels.so` and at last `result.json`. Each cluster's
kernel is compared with PyTorch's operators on random tensors, and timed beside them. A graph's kernels are not: the
training compares its results with those of the segment, and times it there.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ort_accel.errors import in_a_line
from ort_accel.files import write_aside
from ort_accel.generated.description import Description

REQUEST, RESULT, SOURCE = "request.json", "result.json", "kernels.cpp"

NICENESS = 5
PARENT_CHECK_SECONDS = 0.5
OOM_SCORE = Path("/proc/self/oom_score_adj")
TRIALS = 7
MAX_BYTES = 1 << 30
"""The most memory of a cluster's tensors at which it is tried."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The allowed distance from PyTorch's results, as a share of the largest of them."""


class Value(ctypes.Union):
    """An argument of a kernel, as `native/kernels/kernel.h` declares it."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p))


@dataclass
class Request:
    """A cluster or a whole graph to compile."""

    name: str
    source: str
    """Its description."""
    hints: dict[str, int]
    is_graph: bool = False


@dataclass
class Outcome:
    """The outcome for a cluster or a graph."""

    error: str = ""
    conditions: list[str] = field(default_factory=list)
    """Conditions on the symbols under which the kernel may run."""
    eager_seconds: float = math.inf
    generated_seconds: float = math.inf
    wrapper: str = ""
    """The Python module that runs a graph."""
    is_final: bool = True
    """False after an error of the compiler or of the system, which another start may not meet."""

    @property
    def is_faster(self) -> bool:
        """True if the kernel gave PyTorch's results in less time."""
        return not self.error and self.generated_seconds < self.eager_seconds


def main(folder: Path, parent: int) -> None:
    """Compile what a folder's request names, for the process with the id `parent`."""
    give_way()
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    compile_request(folder)


def compile_request(folder: Path) -> None:
    """Compile what a folder's request names."""
    content = json.loads((folder / REQUEST).read_text())
    torch.set_num_threads(content["threads"])
    for name in content["modules"]:  # they define operators
        with suppress(ImportError):
            importlib.import_module(name)
    requests = [Request(**item) for item in content["parts"]]
    outcomes = {request.name: Outcome() for request in requests}
    described: dict[str, Description] = {}
    texts: dict[str, str] = {}
    from ort_accel.generated.inductor import check_compiler, write_program, write_source

    check_compiler()
    for request in requests:
        outcome = outcomes[request.name]
        try:
            found = described[request.name] = Description(request.source, request.name)
            write = write_program if request.is_graph else write_source
            source = write(request.name, found, request.hints)
            outcome.conditions, outcome.wrapper = source.conditions, source.wrapper
            texts[request.name] = source.text
        except Exception as error:  # Inductor raises errors of many kinds
            outcome.error, outcome.is_final = in_a_line(error), not isinstance(error, OSError | MemoryError)
    if library := _library(folder, texts, outcomes):
        for request in requests:
            if not outcomes[request.name].error and not request.is_graph:
                _try_out(library, request, described[request.name], outcomes[request.name])
    write_aside(folder / RESULT, json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}).encode())


def _end_with(parent: int, folder: Path) -> None:
    """End when the training process has ended without an end of this one. It cannot remove the folder then."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def give_way() -> None:
    """Let training go first, for processor time and where the system must end a process for lack of memory."""
    os.nice(NICENESS)
    with suppress(OSError):  # only Linux has such a file
        OOM_SCORE.write_text("1000")


def _library(folder: Path, texts: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> ctypes.CDLL | None:
    """Returns a library of all the C++ that the compiler accepts; None if it accepts nothing."""
    from ort_accel.generated.inductor import PREAMBLE, compile_library

    def built(file: Path, names: Iterable[str]) -> ctypes.CDLL:
        file.write_text(PREAMBLE + "".join(map(texts.__getitem__, names)))
        return ctypes.CDLL(str(compile_library(file)))

    with suppress(Exception):
        return built(folder / SOURCE, texts) if texts else None
    for name in texts:  # each alone, to find the one that the compiler refuses
        try:
            built(folder / f"{name}.cpp", [name])
        except Exception as error:
            outcomes[name].error, outcomes[name].is_final = in_a_line(error), False
    accepted = [name for name in texts if not outcomes[name].error]
    return built(folder / SOURCE, accepted) if accepted else None


def _try_out(library: ctypes.CDLL, request: Request, described: Description, outcome: Outcome) -> None:
    """Compare a kernel with PyTorch at the sizes of the capture and at others, and time both."""
    kernel = library[request.name]
    kernel.restype, kernel.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
    try:
        outcome.error = _difference(kernel, described, request.hints)
        for hints in _other_sizes(request.hints):
            if not outcome.error and all(eval(text, {"math": math}, dict(hints)) for text in outcome.conditions):
                outcome.error = _difference_where_valid(kernel, described, hints)
        if not outcome.error:
            outcome.eager_seconds, outcome.generated_seconds = _seconds(kernel, described, request.hints)
    except Exception as error:
        outcome.error = in_a_line(error)


def _other_sizes(hints: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns sizes at which a kernel for dynamic sizes is compared, too."""
    return [{**hints, name: hint + 1} for name, hint in hints.items()]


def _difference_where_valid(kernel: Any, described: Description, hints: Mapping[str, int]) -> str:
    """Returns how results differ at other sizes; nothing where PyTorch's operators do not fit them."""
    try:
        described.run(*hints.values(), *_tensors(described.inputs(*hints.values())))
    except RuntimeError:
        return ""
    return _difference(kernel, described, hints)


def _difference(kernel: Any, described: Description, hints: Mapping[str, int]) -> str:
    sizes = list(hints.values())
    given, results = _tensors(described.inputs(*sizes)), _empty(described.outputs(*sizes))
    for result in results:  # memory may still hold what the operators have computed before
        result.fill_(math.nan if result.is_floating_point() else 99)
    if kernel(_packed(given, results, sizes)):
        return "the kernel raised an error"
    for at, (found, wanted) in enumerate(zip(results, described.run(*sizes, *given), strict=True)):
        if text := _distance(found, wanted):
            return f"result {at} {text}"
    return ""


def exact_difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Returns how a tensor differs from another beside its finite real numbers; nothing if it does not."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return "has another type or shape"
    if not wanted.is_floating_point():
        return "" if torch.equal(found, wanted) else "has other values"
    finite, infinite = wanted.isfinite(), wanted.isinf()
    has_same = torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found[infinite], wanted[infinite])
    return "" if has_same and found[finite].isfinite().all() else "has other infinities or NaN"


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Returns how a tensor differs from another; nothing if only by rounding."""
    if (text := exact_difference(found, wanted)) or not wanted.is_floating_point():
        return text
    finite = wanted.isfinite()
    one, other = found[finite].double(), wanted[finite].double()
    scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    off = float((one - other).abs().max()) if other.numel() else 0.0
    return "" if off <= TOLERANCE[wanted.dtype] * scale else f"is off by {off:.1e} of {scale:.1e}"


def _seconds(kernel: Any, described: Description, hints: Mapping[str, int]) -> tuple[float, float]:
    """Returns the median times of PyTorch's operators and of the kernel, which take turns."""
    sizes = list(hints.values())
    given = _tensors(described.inputs(*sizes))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TRIALS):
        began = time.perf_counter()
        described.run(*sizes, *given)
        times[0].append(time.perf_counter() - began)
        began = time.perf_counter()
        results = _empty(described.outputs(*sizes))
        kernel(_packed(given, results, sizes))
        times[1].append(time.perf_counter() - began)
    return median(times[0]), median(times[1])


def _packed(
    given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], sizes: Sequence[int]
) -> ctypes.Array[Value]:
    tensors = [Value(pointer=tensor.data_ptr()) for tensor in (*given, *results)]
    return (Value * (len(tensors) + len(sizes)))(*tensors, *(Value(integer=size) for size in sizes))


def _empty(layouts: Sequence[Any]) -> list[torch.Tensor]:
    found = [torch.empty_strided(each.shape, each.strides, dtype=each.dtype) for each in layouts]
    if sum(tensor.untyped_storage().nbytes() for tensor in found) > MAX_BYTES:
        raise MemoryError("its tensors are too large to try it")
    return found


def _tensors(layouts: Sequence[Any]) -> list[torch.Tensor]:
    """Returns random tensors: positive and negative numbers, small whole numbers, booleans."""
    generator = torch.Generator().manual_seed(0)
    found = _empty(layouts)
    for tensor in found:
        memory = tensor.new_empty(0).set_(tensor.untyped_storage())  # several entries of a tensor may share an element
        if memory.is_floating_point():
            memory.copy_(torch.randn(memory.shape, generator=generator))
        else:
            memory.copy_(torch.randint(0, 2 if memory.dtype == torch.bool else 5, memory.shape, generator=generator))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
