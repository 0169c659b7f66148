"""Objects with the published interfaces of Apex AMP and Megatron-LM, which are not installed: loops over tensors.

They are written for these tests from the interfaces, and do what the originals do where no kernels are built.
"""

import types

import torch
from torch import nn


class ApexScaler:
    """`apex.amp.scaler.LossScaler` without its kernels."""

    has_fused_kernel = False

    def __init__(self, scale=256.0, dynamic=True):
        self.dynamic = dynamic
        self._loss_scale = scale
        self._has_overflow = False

    def loss_scale(self):
        return self._loss_scale

    def unscale(self, grads, masters, stashed=None):
        for index, (grad, master) in enumerate(zip(grads, masters, strict=True)):
            total = float(grad.float().sum())
            if self.dynamic and (total in (float("inf"), -float("inf")) or total != total):
                self._has_overflow = True
                return
            value = grad.float() / self._loss_scale
            master.copy_(value if stashed is None else value + stashed[index])


@torch.no_grad()
def apex_post_backward(self, scaler):
    """`post_backward_with_master_weights` of `apex/amp/_process_optimizer.py`."""
    stash = self._amp_stash
    for model, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        if model.grad is None:
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
            scaler.unscale([model.grad], [master.grad])
        else:
            scaler.unscale([model.grad], [master.grad], [master.grad.clone()])
    for index, param in enumerate(stash.all_fp32_from_fp32_params):
        earlier = stash.all_fp32_from_fp32_grad_stash[index]
        if param.grad is None:
            param.grad = earlier
        else:
            scaler.unscale([param.grad], [param.grad], None if earlier is None else [earlier])
        stash.all_fp32_from_fp32_grad_stash[index] = None


def apex_optimizer(params):
    """An optimizer as `amp.initialize(..., opt_level="O2")` leaves it."""
    masters = [nn.Parameter(p.detach().float()) if p.dtype == torch.float16 else p for p in params]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    fp32 = [p for p in params if p.dtype == torch.float32]
    optimizer._amp_stash = types.SimpleNamespace(
        all_fp16_params=[p for p in params if p.dtype == torch.float16],
        all_fp32_from_fp16_params=[m for p, m in zip(params, masters, strict=True) if p.dtype == torch.float16],
        all_fp32_from_fp32_params=fp32,
        all_fp32_from_fp32_grad_stash=[None] * len(fp32),
    )
    optimizer._amp_lazy_init = lambda: None
    optimizer._post_amp_backward = types.MethodType(apex_post_backward, optimizer)
    return optimizer


class FirstMegatronOptimizer:
    """`FP16_Optimizer` of the first Megatron-LM, with its scaler."""

    class Scaler:
        def has_overflow_serial(self, params):
            return any(p.grad is not None and not torch.isfinite(p.grad.float()).all().item() for p in params)

        def has_overflow(self, params):
            return self.has_overflow_serial(params)

    def __init__(self, params):
        self.fp16_groups = [list(params)]
        self.loss_scaler = self.Scaler()
        self.overflow = False

    def _check_overflow(self):
        self.overflow = self.loss_scaler.has_overflow([p for group in self.fp16_groups for p in group])


class MegatronOptimizer:
    """`Float16OptimizerWithFloat16Params`: clipping of its fp32 main gradients."""

    def __init__(self, params, shared=()):
        self.params = list(params)
        self.shared = set(shared)

    def get_parameters(self):
        return self.params

    def get_main_grads_for_grad_norm(self):
        return [p.grad for i, p in enumerate(self.params) if p.grad is not None and i not in self.shared]

    def clip_grad_norm(self, clip_grad):
        total = sum(torch.linalg.vector_norm(grad).item() ** 2 for grad in self.get_main_grads_for_grad_norm()) ** 0.5
        factor = clip_grad / (total + 1e-6)
        if factor < 1.0:
            for param in self.params:
                param.grad.mul_(factor)
        return total
