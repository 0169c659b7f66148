"""Adam and AdamW on PyTorch's fused kernels, with the signature of onnxruntime-training's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from ort_accel.errors import OptimizerError, OrtAccelError
from ort_accel.optim.adam_update import AdamWMode, Batch, ParamGroup, Scaling, update

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class FusedAdam(Optimizer):
    """Adam in three modes, on PyTorch's fused kernels, for parameters of any floating type on any of their devices.

    The arguments up to `set_grad_none` and their defaults are those of onnxruntime-training, the others those of
    `torch.optim.AdamW`; all but `set_grad_none` can differ between parameter groups. `adam_w_mode` is an `AdamWMode`.
    `fp32_state` keeps the moments of 16-bit parameters in fp32 and computes their update in it; the parameters
    themselves stay 16-bit (`FP16_Optimizer` keeps fp32 copies).

    `state_dict()` has the format of `torch.optim.AdamW`, with a few more keys in its groups: each class loads the
    other's states. States of onnxruntime-training's FusedAdam can be loaded, too.
    """

    _step_supports_amp_scaling = True
    """Tells a GradScaler that `step` uses the `grad_scale` and `found_inf` that the scaler sets."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fp32_state: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "fp32_state": fp32_state,
        }
        check_options(options)
        super().__init__(params, options)
        self.defaults["set_grad_none"] = set_grad_none

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters; its options default to the optimizer's."""
        options = {**self.defaults, **param_group}
        check_options(options)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                _check_parameter(param)
        except OptimizerError:
            self.param_groups.pop()
            raise
        _complete(group, self.defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros; `set_grad_none` is the default."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the loss of the closure, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for group in self.param_groups:
            self._update(group["params"], group, scaling)
        return loss

    @torch.no_grad()
    def step_one(self, param: Tensor, group: ParamGroup) -> None:
        """Update one parameter of this group, and drop its gradient."""
        self._update([param], group, Scaling(None, None))
        param.grad = None

    def _update(self, params: Iterable[Tensor], group: ParamGroup, scaling: Scaling) -> None:
        batch = self._batch(params, group)
        if batch.params:
            update(batch, group, scaling)

    def _batch(self, params: Iterable[Tensor], group: ParamGroup) -> Batch:
        batch = Batch()
        for param in params:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise OrtAccelError(
                    f"FusedAdam was given a sparse gradient for a parameter of shape {tuple(param.shape)}, and its "
                    "moments are dense; build the embedding with sparse=False, or use torch.optim.SparseAdam for it"
                )
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(param, group))
                state["exp_avg"] = torch.zeros_like(param, dtype=_state_dtype(param, group))
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            batch.add(param, param.grad, state)
        return batch

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class, of `torch.optim.Adam` or `AdamW`, or of onnxruntime-training's class."""
        loaded = [state_dict]
        last_hook = self.register_load_state_dict_pre_hook(lambda _, changed: loaded.append(changed))
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
        # PyTorch has cast the moments to the parameter's type. They are loaded again, since fp32 moments lost digits.
        saved = chain.from_iterable(group["params"] for group in loaded[-1]["param_groups"])
        for (param, group), key in zip(self._parameters(), saved, strict=True):
            given = loaded[-1]["state"].get(key, {})
            for name in set(given) & set(_MOMENTS):
                moment = given[name].to(device=param.device, dtype=_state_dtype(param, group))
                self.state[param][name] = _with_strides_of(param, moment)

    def __setstate__(self, state: StateDict) -> None:
        """Complete a state that PyTorch has loaded or unpickled."""
        super().__setstate__(state)
        for group in self.param_groups:
            _complete(group, self.defaults)
            steps_so_far = group.pop("step", None)  # onnxruntime-training has one count for a group
            for param in group["params"]:
                param_state = self.state.get(param)
                if not param_state:
                    continue
                step = torch.as_tensor(param_state.get("step", steps_so_far or 0.0), dtype=torch.float32)
                param_state["step"] = step.to(_step_device(param, group))
                if group["amsgrad"] and "max_exp_avg_sq" not in param_state:
                    param_state["max_exp_avg_sq"] = param_state["exp_avg_sq"].clone()
                elif not group["amsgrad"]:
                    param_state.pop("max_exp_avg_sq", None)

    def _parameters(self) -> Iterator[tuple[Tensor, ParamGroup]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group


def check_options(options: ParamGroup) -> None:
    """Raise an `OptimizerError` if an option has an invalid value."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerError(f"Tensor lr must be 1-element, and it has {lr.numel()}")
    if not lr >= 0.0:
        raise OptimizerError(f"Invalid learning rate: {lr}; it is 0 or more")
    if not options["eps"] >= 0.0:
        raise OptimizerError(f"Invalid epsilon value: {options['eps']}; it is 0 or more")
    if not options["weight_decay"] >= 0.0:
        raise OptimizerError(f"Invalid weight_decay value: {options['weight_decay']}; it is 0 or more")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise OptimizerError("betas must be either both floats or both Tensors")
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise OptimizerError(f"Tensor betas[{index}] must be 1-element, and it has {beta.numel()}")
        if not 0.0 <= beta < 1.0:
            raise OptimizerError(f"Invalid beta parameter at index {index}: {beta}; it is at least 0 and below 1")
    if options["adam_w_mode"] not in list(AdamWMode):
        allowed = ", ".join(f"{mode.value} ({mode.name})" for mode in AdamWMode)
        raise OptimizerError(f"Invalid adam_w_mode: {options['adam_w_mode']}; it is one of {allowed}")


def _check_parameter(param: Tensor) -> None:
    if not param.is_floating_point():
        raise OptimizerError(
            f"FusedAdam cannot update a parameter of {param.dtype}, shape {tuple(param.shape)}; its kernels take "
            "float64, float32, bfloat16 and float16; give this parameter to torch.optim.AdamW"
        )


def _complete(group: ParamGroup, defaults: ParamGroup) -> None:
    """Add the keys that a group of another optimizer lacks, and those that another optimizer reads."""
    for key, value in defaults.items():
        if key != "set_grad_none":
            group.setdefault(key, value)
    group["adam_w_mode"] = int(group["adam_w_mode"])
    group["foreach"], group["differentiable"] = None, False
    # PyTorch also reads from this key on which device the step lies.
    group["fused"] = _counts_on_device(group)
    group["decoupled_weight_decay"] = group["adam_w_mode"] != AdamWMode.ADAM_L2_REGULARIZATION


def _counts_on_device(group: ParamGroup) -> bool:
    """True if steps are counted on the device; Hugging Face's rule needs them on the host, unless it is captured."""
    return group["adam_w_mode"] != AdamWMode.ADAMW_TRANSFORMERS or bool(group["capturable"])


def _step_device(param: Tensor, group: ParamGroup) -> torch.device:
    return param.device if _counts_on_device(group) else torch.device("cpu")


def _state_dtype(param: Tensor, group: ParamGroup) -> torch.dtype:
    return torch.float32 if group["fp32_state"] and param.dtype.itemsize < 4 else param.dtype


def _with_strides_of(param: Tensor, moment: Tensor) -> Tensor:
    """Returns a loaded moment with the strides of a new one, which the kernels assume."""
    fresh = torch.empty_like(param, dtype=moment.dtype)
    return moment if moment.stride() == fresh.stride() else fresh.copy_(moment)
