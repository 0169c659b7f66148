"""An optimizer that works on fp32 copies of 16-bit parameters, under a dynamic loss scale."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from ort_accel.errors import OptimizerError, OrtAccelError
from ort_accel.optim import multi_tensor
from ort_accel.optim.adam_update import ParamGroup
from ort_accel.optim.loss_scale import LossScale

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_OF_SCHEDULERS = frozenset({"step", "_opt_called"})
"""Attributes that a scheduler sets on its optimizer."""


class MasterWeightOptimizer(Optimizer):
    """Runs any PyTorch optimizer whose step takes one evaluation on fp32 copies of its 16-bit parameters.

    In a training loop::

        optimizer.zero_grad()
        optimizer.backward(loss)             # as often as gradients are accumulated
        optimizer.clip_grad_norm_(1.0)       # optional, directly before the step
        optimizer.step()

    A step whose gradients are not all finite is skipped: parameters and the optimizer's state stay, the loss scale is
    updated, and `overflow` and `skipped_steps` record it. `state_dict()` holds all of this, so a resumed run equals an
    uninterrupted one.
    """

    def __init__(self, optimizer: Optimizer, loss_scale: LossScale | None = None) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults are those of the inner optimizer.
        closure = signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__} evaluates the model several times in a step, and FP16_Optimizer once; use "
                "it without FP16_Optimizer"
            )
        self.optimizer = optimizer
        self.loss_scale = loss_scale or LossScale()
        self.overflow = False
        """True if the last step was skipped."""
        self.skipped_steps = 0
        self._is_unscaled = False
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        for group in optimizer.param_groups:
            self._replace_params(group)

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]
        """The groups of the inner optimizer, with fp32 copies in place of 16-bit parameters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> StateDict:  # type: ignore[override]
        """The default options of the inner optimizer."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Returns any other attribute of the inner optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> StateDict:
        """Returns all attributes for copies and pickles, but those of schedulers, which belong to this object."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_SCHEDULERS}

    def __setstate__(self, state: StateDict) -> None:
        """Set all attributes."""
        self.__dict__.update(state)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters; 16-bit parameters get fp32 copies."""
        self.optimizer.add_param_group(param_group)
        self._replace_params(self.optimizer.param_groups[-1])

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the scaled loss, for loops that call `backward` themselves."""
        return loss.float() * self.loss_scale.scale

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward of the scaled loss."""
        torch.autograd.backward(self.scale(loss), **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, or fill them with zeros."""
        self._is_unscaled = False
        for model, master in zip(self._params, self._masters, strict=True):
            if model is not master:
                master.grad = None
            if set_to_none:
                model.grad = None
            elif model.grad is not None:
                model.grad = torch.zeros_like(model.grad)

    @torch.no_grad()
    def unscale_(self) -> bool:
        """Convert the gradients to fp32 and divide them by the scale. Returns true if all are finite.

        `clip_grad_norm_` and `step` do so themselves. Afterwards `param_groups` has the gradients.
        """
        if not self._is_unscaled:
            self.overflow = bool(multi_tensor.unscale_(self._fp32_gradients(), 1.0 / self.loss_scale.scale))
            self._is_unscaled = True
        return not self.overflow

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients to a norm. Returns their norm, which is infinite if the step will be skipped."""
        if not self.unscale_():
            return torch.full((), torch.inf)
        grads = [master.grad for master in self._masters if master.grad is not None]
        norm = multi_tensor.total_norm(grads, norm_type)
        if max_norm < torch.inf:
            multi_tensor.multiply_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each number of the gradients to the range from `-clip_value` to `clip_value`."""
        if self.unscale_():
            nn.utils.clip_grad_value_(self._masters, clip_value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip the step. A closure is called once, and must call this object's `backward`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.unscale_():
            self.skip()
            return loss
        self.optimizer.step()
        self._write_back()
        self.loss_scale.update(overflow=False)
        self._is_unscaled = False
        return loss

    def skip(self) -> None:
        """Count a skipped step, and update the loss scale."""
        self.skipped_steps += 1
        self.loss_scale.update(overflow=True)
        self._is_unscaled = False

    def state_dict(self) -> StateDict:
        """Returns the inner state, the fp32 copies, the loss scale and the count of skipped steps."""
        copies = {index: master.detach() for index, master in enumerate(self._masters) if self._is_copy(index)}
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": copies,
            "loss_scale": self.loss_scale.state_dict(),
            "skipped_steps": self.skipped_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, and set the 16-bit parameters from its fp32 copies."""
        if "masters" not in state_dict:
            raise OptimizerError(
                "this is the state of an optimizer without fp32 copies (it has no 'masters'); load it into the "
                "optimizer before it is given to FP16_Optimizer"
            )
        copies = {index for index in range(len(self._masters)) if self._is_copy(index)}
        if set(state_dict["masters"]) != copies:
            raise OptimizerError(
                f"the state has fp32 copies of {len(state_dict['masters'])} parameters and this optimizer of "
                f"{len(copies)}; it belongs to a model with other 16-bit parameters"
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for index, saved in state_dict["masters"].items():
            self._masters[index].copy_(saved)
        self._write_back()
        self.loss_scale.load_state_dict(state_dict["loss_scale"])
        self.skipped_steps = state_dict["skipped_steps"]
        self._is_unscaled = False

    def _replace_params(self, group: ParamGroup) -> None:
        """Replace the 16-bit parameters of a group with fp32 copies."""
        for row, param in enumerate(group["params"]):
            _check(param)
            master = param
            if param.dtype in _SIXTEEN_BIT:
                master = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
                group["params"][row] = master
                if param in self.optimizer.state:
                    self.optimizer.state[master] = _in_fp32(self.optimizer.state.pop(param), param.dtype)
            self._params.append(param)
            self._masters.append(master)

    def _is_copy(self, index: int) -> bool:
        return self._masters[index] is not self._params[index]

    def _fp32_gradients(self) -> list[Tensor]:
        """Returns the gradients for the inner optimizer, in fp32."""
        grads, targets, sources = [], [], []
        for model, master in zip(self._params, self._masters, strict=True):
            if model.grad is None:
                master.grad = None
                continue
            if model.grad.is_sparse:
                raise OrtAccelError(
                    f"FP16_Optimizer was given a sparse gradient for a parameter of shape {tuple(model.shape)}; "
                    "build the embedding with sparse=False"
                )
            if master.grad is None:
                master.grad = torch.empty_like(master)
            if master is not model:
                targets.append(master.grad)
                sources.append(model.grad)
            grads.append(master.grad)
        multi_tensor.copy_(targets, sources)
        return grads

    def _write_back(self) -> None:
        pairs = [
            (model, master) for model, master in zip(self._params, self._masters, strict=True) if model is not master
        ]
        multi_tensor.copy_([model for model, _ in pairs], [master for _, master in pairs])


def _check(param: Tensor) -> None:
    if hasattr(param, "device_mesh"):
        raise OptimizerError(
            "FP16_Optimizer was given a sharded parameter (DTensor), whose overflows the other processes would not "
            "see; with FSDP use its mixed-precision policy, which keeps fp32 weights itself"
        )


def _in_fp32(state: StateDict, dtype: torch.dtype) -> StateDict:
    """Returns the state of a 16-bit parameter of `dtype` in fp32."""
    return {
        name: value.float() if isinstance(value, Tensor) and value.dtype == dtype else value
        for name, value in state.items()
    }
