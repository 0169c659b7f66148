"""DeepSpeed ZeRO stages 1 and 2: one check for overflow and one norm for all gradients of a process.

This is the only file of the room that touches DeepSpeed's optimizer. Checked on deepspeed 0.19.8: the attributes in
`_NEEDED`, and `get_norm_dtype`, `is_model_parallel_parameter`, `mask_nan_or_inf_with_val_inplace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

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

_NEEDED = (
    "has_overflow_partitioned_grads_serial",
    "get_grad_norm_direct",
    "averaged_gradients",
    "params_in_partition",
    "bit16_groups",
    "dp_process_group",
    "_model_parallel_all_reduce",
)


def find(optimizer: ForeignObject) -> Finding | None:
    """Returns the replacements for an optimizer; None if DeepSpeed did not make it."""
    if not type(optimizer).__module__.startswith("deepspeed.runtime"):
        return None
    name = type(optimizer).__name__
    missing = [each for each in _NEEDED if not hasattr(optimizer, each)]
    if missing:
        return Finding(
            "DeepSpeed", refusal=f"{name} has no {missing[0]}; only ZeRO stages 1 and 2 have their checks there"
        )
    if getattr(optimizer, "cpu_offload", False):
        return Finding("DeepSpeed", refusal="with an offloaded optimizer the checks are part of DeepSpeed's backward")
    check = Replacement(
        optimizer,
        "has_overflow_partitioned_grads_serial",
        overflow_check(optimizer),
        lambda method: _overflow_of_synthetic(optimizer, method),
    )
    common_norm = Replacement(
        optimizer,
        "get_grad_norm_direct",
        norm(optimizer),
        lambda method: _norms_of_synthetic(optimizer, method),
    )
    return Finding("DeepSpeed", (check, common_norm), agree=lambda fine: _on_all_processes(optimizer, fine))


def overflow_check(optimizer: ForeignObject) -> Method:
    """Returns the replacement of `has_overflow_partitioned_grads_serial`."""

    def has_overflow_partitioned_grads_serial() -> Tensor:
        groups = (optimizer.averaged_gradients[index] for index in range(len(optimizer.bit16_groups)))
        grads = [grad for group in groups for grad in group if grad is not None]
        return multi_tensor.has_nonfinite(_stored(grads)).reshape(1)

    return has_overflow_partitioned_grads_serial


def norm(optimizer: ForeignObject) -> Method:
    """Returns the replacement of `get_grad_norm_direct`."""
    original: Callable[..., Tensor] = optimizer.get_grad_norm_direct

    def get_grad_norm_direct(gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: float = 2) -> Tensor:
        if float(norm_type) == math.inf:
            return original(gradients, params, norm_type)
        import deepspeed.comm as dist
        from deepspeed.runtime.utils import is_model_parallel_parameter, mask_nan_or_inf_with_val_inplace
        from deepspeed.runtime.zero.utils import get_norm_dtype

        def counts(param: Tensor) -> bool:
            """True if this process counts a parameter that other processes may hold as well."""
            if getattr(param, "ds_pipe_replicated", False):
                return False
            return optimizer.model_parallel_rank == 0 or bool(is_model_parallel_parameter(param))

        own = (grad for grad in gradients if not getattr(grad, "_zero_padding", False))
        counted = [grad for grad, param in zip(own, params, strict=False) if counts(param)]
        norms = multi_tensor.norms(counted, float(norm_type), get_norm_dtype())
        total = torch.zeros((), device=optimizer.device)
        if norms:
            total = torch.stack(norms).pow(float(norm_type)).sum().float().to(optimizer.device)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        total = total.pow(1.0 / float(norm_type))
        mask_nan_or_inf_with_val_inplace(total, device=optimizer.device)
        return total

    return get_grad_norm_direct


def _stored(grads: list[Tensor]) -> list[Tensor]:
    return [grad._values() if grad.is_sparse else grad for grad in grads]


def _overflow_of_synthetic(optimizer: ForeignObject, method: Method) -> list[Answer]:
    original = optimizer.averaged_gradients
    answers: list[Answer] = []
    try:
        for case in with_nonfinite(synthetic_gradients(7, optimizer.dtype, optimizer.device, seed=0)):
            optimizer.averaged_gradients = {index: [*case, None] for index in range(len(optimizer.bit16_groups))}
            answers.append(method())
    finally:
        optimizer.averaged_gradients = original
    return answers


def _norms_of_synthetic(optimizer: ForeignObject, method: Method) -> list[Answer]:
    """Returns the norms of synthetic gradients. All processes make equally many calls, since each call communicates."""
    answers: list[Answer] = []
    for index in range(len(optimizer.bit16_groups)):
        params = optimizer.params_in_partition[index]
        grads = synthetic_gradients(len(params), optimizer.dtype, optimizer.device, seed=index)
        for bad in (None, math.inf, math.nan):
            case = [grad.clone() for grad in grads]
            if bad is not None and case:
                case[-1][0] = bad
            answers.append(method(case, params))
    return answers


def _on_all_processes(optimizer: ForeignObject, fine: bool) -> bool:
    import deepspeed.comm as dist

    flag = torch.tensor([float(fine)], device=optimizer.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
