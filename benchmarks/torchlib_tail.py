"""Finds which operators without a lowering of ours torchlib writes rightly: `python -m benchmarks.torchlib_tail`.

Every call of such an operator that torch's own samples make, forward and backward, is run by ONNX Runtime as torchlib
writes it: as it is, with NaN and infinities mixed in, and behind transposes, which ONNX Runtime fuses.
Writes `ort_accel/lowering/torchlib_fallback.json`. Run it with one runtime, then with the other and `--narrow`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.op_parity import SEED, Case, difference, operators, ort_backend
from ort_accel.lowering import registry, torchlib_fallback
from ort_accel.reporting.report import Report

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NEVER = {
    "aten.as_strided.default",  # looks at its input's memory
    "aten.native_batch_norm.default",  # writes into its inputs unsaid
    "aten.scatter_add.default",  # sums at repeated places may come out wrong in ONNX Runtime
    "aten.upsample_nearest1d.default",  # which pixel is the nearest can depend on rounding, at sizes that no sample has
    "aten.upsample_nearest2d.default",
}

FEWEST, CALLS = 4, 40
"""How many calls of one operator are compared at least and at most, for each set of types."""

Calls = dict[tuple[str, str], list[Any]]


class Collector(TorchDispatchMode):
    """Keeps the calls of operators that torchlib has and we do not."""

    def __init__(self) -> None:
        super().__init__()
        registry.lowerings()
        known = {str(target) for target in registry._LOWERINGS}
        self.wanted = set(torchlib_fallback.torchlib()) - known - NEVER
        self.calls: Calls = defaultdict(list)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name in self.wanted and _is_pure(function):
            leaves, spec = pytree.tree_flatten((args, kwargs or {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            calls = self.calls[name, torchlib_fallback.types_of(tensors)]
            if tensors and len(calls) < CALLS and not any(map(torch.is_complex, tensors)):
                calls.append(([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec))
        return function(*args, **(kwargs or {}))


def _is_pure(function: Any) -> bool:
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not (function._schema.is_mutable or tags & set(function.tags))


def collect(samples: int) -> Calls:
    """The calls that torch's samples make."""
    with Collector() as collector:
        for op in operators():
            for dtype in DTYPES:
                if op.supports_dtype(dtype, "cpu"):
                    torch.manual_seed(SEED)
                    for sample in islice(_samples(op, dtype), samples):
                        _run(Case(op, sample))
    return collector.calls


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    try:
        yield from op.sample_inputs("cpu", dtype, requires_grad=True)
    except Exception:  # not in this type
        return


def _run(case: Case) -> None:
    try:
        list(case.run(case))
    except Exception:  # not for eager either
        return


def survives(name: str, types: str, calls: list[Any]) -> bool:
    """Whether an operator is right, found out in a process of its own, which may crash."""
    registry.lowerings()[torchlib_fallback.overload(name)] = torchlib_fallback.lowering(name, {types})
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(0 if right(name, calls) else 3))
    process.start()
    process.join()
    return process.exitcode == 0


def right(name: str, calls: list[Any]) -> bool:
    """Whether ONNX Runtime gave eager's result for all calls that it could run, and could run some."""
    target = torchlib_fallback.overload(name)
    verdicts = [
        verdict
        for leaves, spec in calls
        for turned in (False, True)
        for verdict in _verdicts(target, leaves, spec, turned)
    ]
    return True in verdicts and False not in verdicts


class Call(torch.nn.Module):
    """One call as a function of its tensors, which are transposed first if `turned`."""

    def __init__(self, target: Any, leaves: list[Any], spec: Any, turned: bool) -> None:
        super().__init__()
        self._target, self._leaves, self._spec, self._turned = target, leaves, spec, turned
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def inputs(self) -> list[torch.Tensor]:
        """The call's tensors."""
        return [self._turn(self._leaves[place]).contiguous() for place in self._places]

    def _turn(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mT if self._turned and tensor.ndim > 1 else tensor

    def forward(self, *tensors: torch.Tensor) -> Any:
        filled = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            filled[place] = self._turn(tensor)
        args, kwargs = pytree.tree_unflatten(filled, self._spec)
        return pytree.tree_leaves(self._target(*args, **kwargs))


def _verdicts(target: Any, leaves: list[Any], spec: Any, turned: bool) -> Iterator[bool | None]:
    """For a call as it is and with odd numbers: right, wrong, or None where PyTorch ran it."""
    call, report = Call(target, leaves, spec, turned), Report()
    program = None
    for inputs in (call.inputs(), [_odd(tensor) for tensor in call.inputs()]):
        try:
            expected = call(*inputs)
        except Exception:  # not for eager either
            continue
        try:
            program = program or ort_backend(report)(call, inputs)
            actual = [list(program(*inputs)) for _ in range(2)]
        except Exception:
            yield False
            return
        if any(item.op == str(target) for item in report.fallbacks):
            yield None
            return
        yield not any(difference(result, expected) for result in actual)


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers with NaN, infinities, zeros and repetitions among them."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return tensor
    odd = tensor.clone().flatten()
    for place, number in enumerate([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0, 1.0]):
        odd[place * 2 :: 17] = number
    return odd.view(tensor.shape)


def main() -> int:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--narrow", action="store_true", help="keep only what the list has already, from another runtime"
    )
    parser.add_argument("--samples", type=int, default=8, help="samples of an operator, in each type")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    listed = json.loads(torchlib_fallback.LIST.read_text())["operators"]
    found: dict[str, list[str]] = defaultdict(list)
    for (name, types), made in sorted(collect(options.samples).items()):
        is_right = len(made) >= FEWEST and survives(name, types, made)
        print(f"{'right' if is_right else 'not'} {name} {types}: {len(made)} calls", flush=True)
        if is_right and (not options.narrow or types in listed.get(name, [])):
            found[name].append(types)
    found = {name: types for name, types in found.items() if any("float32" in item for item in types)}
    record = {"torch": version("torch"), "onnxscript": version("onnxscript"), "operators": found}
    torchlib_fallback.LIST.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
