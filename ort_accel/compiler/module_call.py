"""Standing in for a module's call: compiles what is new, with sizes kept open once they were seen to change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ort_accel.capture.dynamic_shapes import Foreseen, OpenSizes, settle_problem_type
from ort_accel.capture.dynamo import GraphBreaks, capturing, forget, graph_breaks_in
from ort_accel.capture.dynamo_failures import LeftToPython, NotCapturedError, line_of_fault
from ort_accel.compiler.backend import Backend
from ort_accel.compiler.row_dispatch import Mode
from ort_accel.graph_cache.store import FOUND
from ort_accel.kernels.tensor_asserts import is_failed_check
from ort_accel.runtime.lazy_tensor import UnreadTensor, read_all

AROUND = "trace and first run"
"""The phase of set-up that is around the backend: Dynamo reads the code and makes checks, and what it made is run."""


def own_entry(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that only makes this call, with code that nothing else shares.

    Dynamo keeps what it compiled with the code where capture begins, and counts it against a limit. With shared code a
    search that builds many models would run the later ones in eager mode. Besides, Dynamo does not look into torch's
    own classes unless a frame from outside leads there.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    entry.__code__ = entry.__code__.replace(co_name=f"call_of_{name}")
    return entry


class Compiled:
    """A function that is compiled whenever it meets something new."""

    def __init__(self, call: Callable[..., Any], name: str, backend: Backend) -> None:
        self._plain, self._name, self._backend = call, name, backend
        self._calls: dict[Mode | None, Callable[..., Any]] = {}
        self._open_sizes = OpenSizes(backend.foreseen) if backend.config.engine.dynamic_shapes == "auto" else None
        self._breaks = GraphBreaks()
        self._left = LeftToPython(backend.policy.not_compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:  # compiled graphs have no tangents
            return self._plain(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, UnreadTensor) for leaf in leaves):
            args, kwargs = read_all((args, kwargs))
            leaves = pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled():
            return self._backend.comparison.call(
                args[0], leaves, lambda: self._on_engine(leaves, args, kwargs), lambda: self._plain(*args, **kwargs)
            )
        evaluation = self._backend.evaluation
        if evaluation.is_in_eager or self._backend.comparison.waits_in_eager:
            with evaluation.in_eager():
                return self._plain(*args, **kwargs)
        return self._on_engine(leaves, args, kwargs)

    def _on_engine(self, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """Make a call on what is compiled for it, or compile that."""
        if self._open_sizes is not None:
            self._open_sizes.mark([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        # On every call: a mode or a `requires_grad` that changes leads to a capture, too.
        backend = self._backend
        with capturing(), graph_breaks_in(backend.report, self._breaks, backend.policy.check), self._left.watched():
            mode = backend.skipping.mode
            compiled = self._compiled(mode)
            failure: Exception | None = None
            try:
                with self._timed():
                    result = compiled(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, NotCapturedError) and not is_failed_check(error):
                    raise
                failure = error
            if isinstance(failure, NotCapturedError):
                return self._in_python(failure, args, kwargs)
            if failure is not None:  # eager mode says in the model's own words what is wrong with the batch
                return self._plain(*args, **kwargs)
            if mode is None:  # the first batch has decided, and what was compiled is for that mode
                first = self._calls.pop(None, None)
                if first is not None:  # else another thread was here before
                    self._calls.setdefault(backend.skipping.mode, first)
            return result

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Tell how long a call took that compiled something, and note what of it no phase accounts for."""
        report = self._backend.report
        compiled, taken = report.counters["compilations"], report.counters[FOUND]
        phases, begin = report.set_up_seconds, time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        is_compiled = report.counters["compilations"] > compiled
        if is_compiled:
            self._backend.evaluation.compiled_a_step(seconds)
        if is_compiled or report.counters[FOUND] > taken:
            report.timings[AROUND] = report.timings.get(AROUND, 0.0) + seconds - (report.set_up_seconds - phases)

    def _in_python(self, failure: NotCapturedError, args: Any, kwargs: Any) -> Any:
        """Make a call as eager mode does; later ones are captured in parts. If it raises an error, that says more than
        Dynamo's."""
        result = self._plain(*args, **kwargs)
        self._backend.skipping.refused(failure.fault)
        self._backend.policy.not_compiled(f"a call of {self._name}", failure.fault, line_of_fault(failure.fault))
        self._left.leave(failure.code)
        return result

    def _compiled(self, mode: Mode | None) -> Callable[..., Any]:
        """What runs in a mode; what was compiled for another one is kept."""
        if mode not in self._calls:
            entry = own_entry(self._plain, self._name)
            self._left.begins_at(entry.__code__)
            finalize(entry, forget, entry.__code__, ref(self._backend)).atexit = False
            self._calls[mode] = torch.compile(entry, backend=self._backend, dynamic=_dynamic(self._backend))
        return self._calls[mode]


@dataclass
class OutsideLoss:
    """A loss that is computed from what a model gives, to be compiled together with the model."""

    function: Callable[..., torch.Tensor]
    """Called with the model's outputs, and with the arguments."""
    arguments: tuple[Any, ...]
    value: torch.Tensor | None = None
    """The loss of the call that took this up."""


class ModelCall:
    """What an accelerated model runs when it is called. Lives in the module's slot for `nn.Module.compile`."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.backend, self._model = backend, ref(model)

    @property
    def model(self) -> nn.Module:
        """The model, which calls this."""
        model = self._model()
        assert model is not None
        return model

    def take_over(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Serve this model, in the place of the present one, with all that was compiled. Says whether that can be."""
        return False

    def begin(self, args: Any, kwargs: Any) -> None:
        """Told of a call that is about to be made."""
        self.backend.settle()
        self.backend.progress.call()
        if self.backend.inspector is not None:
            self.backend.inspector.call(self.model, args, kwargs)

        if self.backend.memory_watch is not None and torch.is_grad_enabled():
            self.backend.memory_watch.before_forward(self.model)

    def end(self, outputs: Any) -> Any:
        """Told of what a call gave, which it returns."""
        if self.backend.memory_watch is not None and torch.is_grad_enabled():
            self.backend.memory_watch.after_forward(outputs)
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        raise NotImplementedError

    def foresee(self, sizes: Foreseen) -> None:
        """Told of what is known about the batches to come, before the first one."""
        self.backend.foreseen.add(sizes)

    @contextmanager
    def together_with(self, loss: OutsideLoss) -> Iterator[None]:  # noqa: ARG002
        """While this is entered, the next call computes this loss, too, where that can be."""
        yield

    def anew(self, model: nn.Module) -> ModelCall:
        """The same for this model, with nothing compiled yet."""
        raise NotImplementedError

    def release(self) -> None:
        """Leave what it put elsewhere in the model."""
        self.backend.release()


def _call_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = model._call_impl
    return call(*args, **kwargs)


class CompiledCall(ModelCall):
    """Runs a model that is captured as a whole. What is compiled takes the model as an argument, so that another model
    of the same kind can have it: Dynamo's checks say whether they are alike in all that matters."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        super().__init__(model, backend)
        self._kind = type(model)
        self._call = Compiled(_call_of, self._kind.__name__, backend)
        self._loss: OutsideLoss | None = None
        self._joined: tuple[Callable[..., torch.Tensor], Compiled] | None = None
        self._has_seen_labels = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if torch.compiler.is_compiling():
            return self._call(model, *args, **kwargs)
        self.begin(args, kwargs)
        if not self._has_seen_labels and isinstance(labels := kwargs.get("labels"), torch.Tensor):
            self._has_seen_labels = True
            settle_problem_type(model, labels)
        loss, self._loss = self._loss, None
        if loss is None:
            return self.end(self._call(model, *args, **kwargs))
        outputs, loss.value = self._joined_with(loss.function)(model, loss.arguments, *args, **kwargs)
        if isinstance(outputs, MutableMapping):  # where DDP, which may stand around the model, looks for what is used
            outputs["loss"] = loss.value
        return self.end(outputs)

    @contextmanager
    def together_with(self, loss: OutsideLoss) -> Iterator[None]:
        self._loss = loss
        try:
            yield
        finally:
            self._loss = None

    def _joined_with(self, function: Callable[..., torch.Tensor]) -> Compiled:
        """The model and a loss as one; what was compiled for another loss is not kept."""
        if self._joined is None or self._joined[0] != function:

            def joined(
                model: nn.Module, arguments: tuple[Any, ...], *args: Any, **kwargs: Any
            ) -> tuple[Any, torch.Tensor]:
                outputs = _call_of(model, *args, **kwargs)
                return outputs, function(outputs, *arguments)

            self._joined = function, Compiled(joined, self._kind.__name__, self.backend)
        return self._joined[1]

    def take_over(self, model: nn.Module) -> bool:
        if type(model) is not self._kind:
            return False
        before = self._model()
        if before is not None:
            before._compiled_call_impl = None
        model._compiled_call_impl = self
        self._model, self._has_seen_labels = ref(model), False
        return True

    def anew(self, model: nn.Module) -> CompiledCall:
        return CompiledCall(model, self.backend)


def _dynamic(backend: Backend) -> bool | None:
    wish = backend.config.engine.dynamic_shapes
    return None if wish == "auto" else wish
