"""Megatron-LM: one check for overflow, and one norm for clipping.

This is the only file that touches Megatron. Two interfaces are recognized by their methods. Megatron's first
FP16_Optimizer has `loss_scaler.has_overflow_serial`. Its later optimizers have fp32 main gradients: `clip_grad_norm`,
`get_main_grads_for_grad_norm`, `get_parameters`, and the group of `get_grad_stats_parallel_group` or
`get_model_parallel_group`. The file follows Megatron's published source, and is tested on objects with these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ort_accel.optim import multi_tensor
from ort_accel.optim.modifiers.replacement import (
    Answer,
    Finding,
    ForeignObject,
    Method,
    Replacement,
    synthetic_gradients,
    with_nonfinite,
)


def find(optimizer: ForeignObject) -> Finding | None:
    """Returns the replacements for an optimizer; None if it has neither of the interfaces."""
    if hasattr(optimizer, "_check_overflow") and hasattr(
        getattr(optimizer, "loss_scaler", None), "has_overflow_serial"
    ):
        scaler = optimizer.loss_scaler
        check = Replacement(scaler, "has_overflow_serial", _has_overflow_serial, _overflow_of_synthetic)
        return Finding("Megatron", (check,))
    if all(hasattr(optimizer, name) for name in ("clip_grad_norm", "get_main_grads_for_grad_norm", "get_parameters")):
        clip = Replacement(
            optimizer,
            "clip_grad_norm",
            _clip_grad_norm(optimizer),
            lambda method: _clip_synthetic(optimizer, method),
        )
        return Finding("Megatron", (clip,), agree=lambda fine: _on_all_processes(optimizer, fine))
    if type(optimizer).__module__.startswith("megatron."):
        return Finding(
            "Megatron", refusal=f"{type(optimizer).__name__} has none of the methods that are known to be slow"
        )
    return None


def _has_overflow_serial(params: Iterable[Tensor]) -> bool:
    return bool(multi_tensor.has_nonfinite(param.grad for param in params if param.grad is not None))


def _overflow_of_synthetic(method: Method) -> list[Answer]:
    answers: list[Answer] = []
    for case in with_nonfinite(synthetic_gradients(7, torch.float16, torch.device("cpu"), seed=0)):
        params = [nn.Parameter(torch.zeros_like(grad)) for grad in case]
        for param, grad in zip(params[1:], case[1:], strict=True):
            param.grad = grad
        answers.append(method(params))
    return answers


def _clip_grad_norm(optimizer: ForeignObject) -> Method:
    @torch.no_grad()
    def clip_grad_norm(clip_grad: float) -> float:
        grads = optimizer.get_main_grads_for_grad_norm()
        norms = multi_tensor.norms(grads, dtype=torch.float32)
        params: Sequence[Tensor] = optimizer.get_parameters()
        device = norms[0].device if norms else next((param.device for param in params), torch.device("cpu"))
        square = torch.stack(norms).square().sum().reshape(1) if norms else torch.zeros(1, device=device)
        group = _group(optimizer)
        if dist.is_initialized():
            dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
        total = square.sqrt().item()
        factor = clip_grad / (total + 1e-6)
        if factor < 1.0:
            found = map(_main_grad, params)
            multi_tensor.multiply_([grad for grad in found if grad is not None], torch.tensor(factor))
        return total

    return clip_grad_norm


def _group(optimizer: ForeignObject) -> dist.ProcessGroup | None:
    for name in ("get_grad_stats_parallel_group", "get_model_parallel_group"):
        if hasattr(optimizer, name):
            group: dist.ProcessGroup = getattr(optimizer, name)()
            return group
    return None


def _main_grad(param: Tensor) -> Tensor | None:
    """Returns the gradient that Megatron clips, which may be decoupled from autograd's."""
    return param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)


def _clip_synthetic(optimizer: ForeignObject, method: Method) -> list[Answer]:
    params = list(optimizer.get_parameters())
    kept = [(param, param.grad) for param in params]
    answers: list[Answer] = []
    try:
        for scale, clip in ((1.0, 1e9), (1.0, 0.1), (0.0, 1.0)):
            for param, value in zip(
                params, synthetic_gradients(len(params), torch.float32, torch.device("cpu"), 0), strict=True
            ):
                param.grad = torch.full_like(param, scale * float(value[0]))
            answers.append(method(clip))
            answers += [param.grad.clone() for param in params]
    finally:
        for param, grad in kept:
            param.grad = grad
    return answers


def _on_all_processes(optimizer: ForeignObject, fine: bool) -> bool:
    if not dist.is_initialized():
        return fine
    params = optimizer.get_parameters()
    flag = torch.tensor([float(fine)], device=params[0].device if params else None)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=_group(optimizer))
    return bool(flag.item())
