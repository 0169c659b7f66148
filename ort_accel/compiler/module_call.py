"""Replaces a module's call by compiled code, and compiles anew for new modes and shapes."""

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

from ort_accel.capture.dynamic_shapes import DynamicDims, ForeseenSizes, settle_problem_type
from ort_accel.capture.dynamo import GraphBreaks, capturing, free_compiled, record_graph_breaks
from ort_accel.capture.dynamo_failures import NotCapturedError, SkippedCode, failure_line
from ort_accel.compiler.backend import Backend
from ort_accel.compiler.row_dispatch import Mode
from ort_accel.graph_cache.store import GRAPHS_LOADED
from ort_accel.kernels.tensor_asserts import is_failed_check
from ort_accel.runtime.lazy_tensor import LazyTensor, compute_all
from ort_accel.runtime.work_count import WORK

TRACE_AND_FIRST_RUN = "trace and first run"
"""The report's phase for the set-up outside of the backend: Dynamo's trace and guards, and the first run."""


def own_entry(call: Callable[..., object], name: str) -> Callable[..., object]:
    """Returns a function that only makes this call, and shares its code object with no other function.

    Dynamo caches compiled graphs by code object, up to a limit. With shared code, a search over many models would run
    the later ones in eager mode. Dynamo traces torch's own classes only from a frame outside of torch.
    """

    def entry(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    entry.__code__ = entry.__code__.replace(co_name=f"call_of_{name}")
    return entry


class Compiled:
    """A function that is compiled for each new mode and shape."""

    def __init__(self, call: Callable[..., object], name: str, backend: Backend) -> None:
        self._plain, self._name, self._backend = call, name, backend
        self._calls: dict[Mode | None, Callable[..., object]] = {}
        self._open_sizes = DynamicDims(backend.foreseen) if backend.config.engine.dynamic_shapes == "auto" else None
        self._breaks = GraphBreaks()
        self._left_to_python = SkippedCode(backend.policy.not_compiled)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if _is_traced() or forward_ad._current_level >= 0:  # graphs have no forward-mode AD
            return self._plain(*args, **kwargs)
        has_cache = self._backend.settings.sees_steps and kwargs.get("past_key_values") is not None
        if has_cache and not torch.is_grad_enabled():  # a step of `generate`
            return self._in_eager(args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, LazyTensor) for leaf in leaves):
            args, kwargs = compute_all((args, kwargs))
            leaves = pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled():
            assert isinstance(args[0], nn.Module)
            return self._backend.comparison.call(
                args[0], leaves, lambda: self._on_engine(leaves, args, kwargs), lambda: self._in_eager(args, kwargs)
            )
        evaluation = self._backend.evaluation
        if evaluation.is_in_eager or self._backend.comparison.waits_in_eager:
            with evaluation.in_eager():
                return self._plain(*args, **kwargs)
        return self._on_engine(leaves, args, kwargs)

    def _on_engine(self, leaves: list[object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the call on its compiled graphs, which are compiled if they do not exist."""
        if self._open_sizes is not None:
            self._open_sizes.mark([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        # On every call, since a changed mode or `requires_grad` also leads to a capture.
        backend = self._backend
        with (
            capturing(),
            record_graph_breaks(backend.report, self._breaks, backend.policy.check),
            self._left_to_python.watched(),
        ):
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
            if failure is not None:  # eager mode raises the model's own error for the batch
                return self._in_eager(args, kwargs)
            if mode is None:  # the first batch decided the mode of the graphs
                first = self._calls.pop(None, None)
                if first is not None:  # otherwise another thread has moved it
                    self._calls.setdefault(backend.skipping.mode, first)
            return result

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Measure a call that compiles, and record the part of its time that belongs to no other phase."""
        report = self._backend.report
        compiled, taken = report.counters["compilations"], report.counters[GRAPHS_LOADED]
        phases, begin = report.set_up_seconds, time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        is_compiled = report.counters["compilations"] > compiled
        if is_compiled:
            self._backend.evaluation.compiled_a_step(seconds)
        if is_compiled or report.counters[GRAPHS_LOADED] > taken:
            report.timings[TRACE_AND_FIRST_RUN] = (
                report.timings.get(TRACE_AND_FIRST_RUN, 0.0) + seconds - (report.set_up_seconds - phases)
            )

    def _in_python(self, failure: NotCapturedError, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a call in eager mode, whose errors say more than Dynamo's; later calls are captured in parts."""
        result = self._in_eager(args, kwargs)
        self._backend.skipping.refused(failure.fault)
        self._backend.policy.not_compiled(f"a call of {self._name}", failure.fault, failure_line(failure.fault))
        self._left_to_python.leave(failure.code)
        return result

    def _in_eager(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        WORK.missed()
        return self._plain(*args, **kwargs)

    def _compiled(self, mode: Mode | None) -> Callable[..., object]:
        """Returns the function that is compiled for a mode; those for other modes are kept."""
        if mode not in self._calls:
            entry = own_entry(self._plain, self._name)
            self._left_to_python.begins_at(entry.__code__)
            finalize(entry, free_compiled, entry.__code__, ref(self._backend)).atexit = False
            self._calls[mode] = torch.compile(entry, backend=self._backend, dynamic=_dynamic(self._backend))
        return self._calls[mode]


@dataclass
class OutsideLoss:
    """A loss outside of the model, to be compiled together with it."""

    function: Callable[..., torch.Tensor]
    """Called with the model's outputs, and with the arguments."""
    arguments: tuple[object, ...]
    value: torch.Tensor | None = None
    """The loss, once a call has computed it."""


class ModelCall:
    """The callable of an accelerated model, in the module's slot for `nn.Module.compile`."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.backend, self._model = backend, ref(model)

    @property
    def model(self) -> nn.Module:
        """Returns the model."""
        model = self._model()
        assert model is not None
        return model

    def take_over(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Serve this model in place of the present one, with all compiled graphs; returns False if it cannot."""
        return False

    def begin(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Called before each call of the model."""
        self.backend.settle()
        self.backend.progress.call()
        if self.backend.inspector is not None:
            self.backend.inspector.call(self.model, args, kwargs)

        if self.backend.memory_watch is not None and torch.is_grad_enabled():
            self.backend.memory_watch.before_forward(self.model)

    def end(self, outputs: object) -> object:
        """Called after each call of the model; returns its outputs."""
        if self.backend.memory_watch is not None and torch.is_grad_enabled():
            self.backend.memory_watch.after_forward(outputs)
        return outputs

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the model."""
        raise NotImplementedError

    def foresee(self, sizes: ForeseenSizes) -> None:
        """Take note of the sizes of batches to come, before the first batch."""
        self.backend.foreseen.add(sizes)

    @contextmanager
    def together_with(self, loss: OutsideLoss) -> Iterator[None]:  # noqa: ARG002
        """Have the next call compute this loss as well, if it can, while the context is entered."""
        yield

    def anew(self, model: nn.Module) -> ModelCall:
        """Returns a call for this model with nothing compiled yet."""
        raise NotImplementedError

    def release(self) -> None:
        """Undo changes to the model outside of its slot."""
        self.backend.release()


def _call_of(model: nn.Module, *args: object, **kwargs: object) -> object:
    call: Callable[..., object] = model._call_impl
    return call(*args, **kwargs)


class CompiledCall(ModelCall):
    """Runs a model that is captured as a whole.

    Compiled code takes the model as an argument, so that another model of its class can use it if Dynamo's guards hold.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        super().__init__(model, backend)
        self._kind = type(model)
        self._call = Compiled(_call_of, self._kind.__name__, backend)
        self._loss: OutsideLoss | None = None
        self._joined: tuple[Callable[..., torch.Tensor], Compiled] | None = None
        self._has_seen_labels = False

    def __call__(self, *args: object, **kwargs: object) -> object:
        model = self.model
        if _is_traced():
            return self._call(model, *args, **kwargs)
        self.begin(args, kwargs)
        if not self._has_seen_labels and isinstance(labels := kwargs.get("labels"), torch.Tensor):
            self._has_seen_labels = True
            settle_problem_type(model, labels)
        loss, self._loss = self._loss, None
        if loss is None:
            return self.end(self._call(model, *args, **kwargs))
        outputs, loss.value = self._joined_with(loss.function)(model, loss.arguments, *args, **kwargs)
        if isinstance(outputs, MutableMapping):  # where a DDP around the model looks for used outputs
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
        """Returns the model and a loss compiled as one; graphs for another loss are dropped."""
        if self._joined is None or self._joined[0] != function:

            def joined(
                model: nn.Module, arguments: tuple[object, ...], *args: object, **kwargs: object
            ) -> tuple[object, torch.Tensor]:
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


def _is_traced() -> bool:
    """True while Dynamo or `torch.jit.trace` records what a model does."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def _dynamic(backend: Backend) -> bool | None:
    wish = backend.config.engine.dynamic_shapes
    return None if wish == "auto" else wish
