"""Apex AMP with master weights, without Apex's own kernels: one unscaling and check for all gradients.

This is the only file that touches Apex: `_amp_stash` and `_post_amp_backward(scaler)`, which `amp.initialize` gives to
an optimizer, and the scalers in `apex.amp._amp_state`. It follows Apex's published source, and is tested on objects
with that interface, since Apex is no package of the Python index.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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


def find(optimizer: ForeignObject) -> Finding | None:
    """Returns the replacements for an optimizer; None if it did not go through `amp.initialize`."""
    if not (hasattr(optimizer, "_amp_stash") and hasattr(optimizer, "_post_amp_backward")):
        return None
    stash = optimizer._amp_stash
    getattr(optimizer, "_amp_lazy_init", bool)()
    if not hasattr(stash, "all_fp32_from_fp16_params"):
        return Finding("Apex", refusal="there are no fp32 master weights; only opt_level O2 has them")
    scalers = _scalers()
    if not scalers:
        return Finding("Apex", refusal="apex.amp has no loss scaler yet; call amp.initialize before")
    if any(getattr(scaler, "has_fused_kernel", False) for scaler in scalers):
        return Finding("Apex", refusal="Apex's own multi-tensor kernels are built; nothing is slow here")
    ours = _post_backward(optimizer)
    trial = Replacement(
        optimizer, "_post_amp_backward", ours, lambda method: _on_synthetic_gradients(stash, scalers[0], method)
    )
    return Finding("Apex", (trial,))


def _scalers() -> Sequence[ForeignObject]:
    module = sys.modules.get("apex.amp._amp_state")
    return getattr(getattr(module, "_amp_state", None), "loss_scalers", ())


def _post_backward(optimizer: ForeignObject) -> Method:
    @torch.no_grad()
    def _post_amp_backward(scaler: ForeignObject) -> None:
        """Copy fp16 gradients to the fp32 copies, unscale all, and add the gradients of earlier backwards."""
        stash = optimizer._amp_stash
        getattr(optimizer, "_amp_lazy_init", bool)()
        new, earlier_grads = [], []
        sources, targets = [], []
        for model, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
            if model.grad is None:
                continue
            earlier_grads.append(master.grad)
            master.grad = torch.empty_like(master)
            sources.append(model.grad)
            targets.append(master.grad)
            new.append(master.grad)
        multi_tensor.copy_(targets, sources)
        saved = stash.all_fp32_from_fp32_grad_stash
        for index, param in enumerate(stash.all_fp32_from_fp32_params):
            if param.grad is None:
                param.grad = saved[index]
            else:
                new.append(param.grad)
                earlier_grads.append(saved[index])
            saved[index] = None
        overflow = multi_tensor.unscale_(new, 1.0 / scaler.loss_scale())
        for grad, earlier in zip(new, earlier_grads, strict=True):
            if earlier is not None:
                grad.add_(earlier)
        if scaler.dynamic and bool(overflow):
            scaler._has_overflow = True

    return _post_amp_backward


def _on_synthetic_gradients(stash: ForeignObject, scaler: ForeignObject, method: Method) -> list[Answer]:
    """Returns the answers for gradients of the model's shapes, with and without gradients of an earlier backward."""
    params = [*stash.all_fp16_params, *stash.all_fp32_from_fp32_params]
    masters = stash.all_fp32_from_fp16_params
    kept_scaler, kept_stash = dict(scaler.__dict__), list(stash.all_fp32_from_fp32_grad_stash)
    kept_grads = [(param, param.grad) for param in [*params, *masters]]
    answers: list[Answer] = []
    try:
        for accumulated in (False, True):
            for case in with_nonfinite(synthetic_gradients(len(params), torch.float32, params[0].device, seed=0)):
                scaler.__dict__.update(kept_scaler)
                for param, value in zip(params, case, strict=True):
                    # One value everywhere but at the end, which may be infinite or NaN.
                    param.grad = torch.full_like(param, float(value[0]))
                    param.grad.view(-1)[-1] = value[-1].to(param.dtype)
                for master in masters:
                    master.grad = torch.ones_like(master) if accumulated else None
                fp32 = stash.all_fp32_from_fp32_params
                stash.all_fp32_from_fp32_grad_stash[:] = [torch.ones_like(p) if accumulated else None for p in fp32]
                method(scaler)
                answers += [scaler._has_overflow, *([] if scaler._has_overflow else _grads([*masters, *fp32]))]
    finally:
        scaler.__dict__.update(kept_scaler)
        stash.all_fp32_from_fp32_grad_stash[:] = kept_stash
        for param, grad in kept_grads:
            param.grad = grad
    return answers


def _grads(params: list[Tensor]) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in params]
