"""One update of Adam on lists of tensors, by PyTorch's fused kernels.

The kernels compute Adam and AdamW with bias correction. The other rules are expressed by them, without another pass
over the memory:

- No bias correction is the update at step infinity, where the corrections `1 - beta ** step` are one.
- Hugging Face's AdamW is `p = (p - a * m / (sqrt(v) + eps)) * (1 - d)` with `a = lr * sqrt(bc2) / bc1` and
  `d = lr * decay`. At step infinity the kernel computes `p * (1 - r * w) - r * m / (sqrt(v) + eps)`, which is the same
  for `r = a * (1 - d)` and `w = d / r`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ort_accel.errors import OrtAccelError

ParamGroup = dict[str, Any]

_MAX_COPIED_ELEMENTS = 1 << 24
"""The most elements that are converted for the kernels at a time, which bounds the temporary memory."""


class AdamWMode(IntEnum):
    """The three update rules."""

    ADAM_L2_REGULARIZATION = 0
    """Adam: the decay is part of the gradient."""
    ADAMW_TRANSFORMERS = 1
    """Hugging Face's AdamW: decay after the update, and `eps` added before the second moment is corrected."""
    ADAMW_TORCH = 2
    """PyTorch's AdamW: decay before the update."""


@dataclass
class Batch:
    """The parameters of one group that have gradients, and their state in the same order."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def add(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """Append a parameter."""
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(state["exp_avg"])
        self.exp_avg_sqs.append(state["exp_avg_sq"])
        self.steps.append(state["step"])
        if "max_exp_avg_sq" in state:
            self.max_exp_avg_sqs.append(state["max_exp_avg_sq"])

    def pick(self, rows: list[int]) -> Batch:
        """Returns a batch of the parameters in these rows."""
        return Batch(
            [self.params[row] for row in rows],
            [self.grads[row] for row in rows],
            [self.exp_avgs[row] for row in rows],
            [self.exp_avg_sqs[row] for row in rows],
            [self.max_exp_avg_sqs[row] for row in rows] if self.max_exp_avg_sqs else [],
            [self.steps[row] for row in rows],
        )


@dataclass(frozen=True)
class Scaling:
    """The tensors that a GradScaler gives to an optimizer that unscales gradients itself."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def update(batch: Batch, group: ParamGroup, scaling: Scaling) -> None:
    """Advance the parameters of a batch by one step, by the rule and the options of their group."""
    for part in _parts_for_kernels(batch):
        if group["adam_w_mode"] != AdamWMode.ADAMW_TRANSFORMERS:
            _update_torch(part, group, scaling)
        elif group["capturable"]:
            _update_transformers_on_device(part, group, scaling)
        else:
            _update_transformers(part, group, scaling)


def _parts_for_kernels(batch: Batch) -> Iterator[Batch]:
    """Yields the batch in parts whose tensors agree in type and memory layout, which the kernels need and do not check.

    Tensors that differ are copied for the update, a bounded amount at a time, and their parameters are written back.
    """
    layouts = zip(batch.params, batch.grads, batch.exp_avgs, strict=True)
    differing = [
        row for row, (param, grad, avg) in enumerate(layouts) if not (_agree(param, avg) and _agree(grad, avg))
    ]
    if not differing:
        yield batch
        return
    if len(differing) < len(batch.params):
        yield batch.pick(sorted(set(range(len(batch.params))) - set(differing)))
    for rows in _bounded(differing, batch.params):
        part = batch.pick(rows)
        originals = part.params
        part.params = [_converted_like(avg, param) for param, avg in zip(part.params, part.exp_avgs, strict=True)]
        part.grads = [_converted_like(avg, grad) for grad, avg in zip(part.grads, part.exp_avgs, strict=True)]
        yield part
        for original, updated in zip(originals, part.params, strict=True):
            if original is not updated:
                original.copy_(updated)


def _agree(tensor: Tensor, state: Tensor) -> bool:
    if tensor.dtype != state.dtype:
        return False
    return tensor.stride() == state.stride() or (tensor.is_contiguous() and state.is_contiguous())


def _converted_like(state: Tensor, tensor: Tensor) -> Tensor:
    return tensor if _agree(tensor, state) else torch.empty_like(state).copy_(tensor)


def _bounded(rows: list[int], params: list[Tensor]) -> Iterator[list[int]]:
    taken: list[int] = []
    size = 0
    for row in rows:
        if taken and size + params[row].numel() > _MAX_COPIED_ELEMENTS:
            yield taken
            taken, size = [], 0
        taken.append(row)
        size += params[row].numel()
    yield taken


def _update_torch(batch: Batch, group: ParamGroup, scaling: Scaling) -> None:
    if group["bias_correction"]:
        _kernel(batch, group, scaling, lr=group["lr"], weight_decay=group["weight_decay"], steps=batch.steps)
    else:
        _advance(batch.steps, scaling)
        _kernel(batch, group, scaling, lr=group["lr"], weight_decay=group["weight_decay"])


def _update_transformers(batch: Batch, group: ParamGroup, scaling: Scaling) -> None:
    """Update by Hugging Face's AdamW, with steps counted on the host. Parameters at equal steps share a kernel."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise OrtAccelError(
            "FusedAdam is captured in a CUDA graph, and its step size would never change again; "
            "build it with capturable=True"
        )
    if scaling.found_inf is not None and scaling.found_inf.item():
        return
    _advance(batch.steps, Scaling())
    at_step: defaultdict[float, list[int]] = defaultdict(list)
    for row, counter in enumerate(batch.steps):
        at_step[counter.item()].append(row)
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    decay = lr * group["weight_decay"]
    for step, rows in at_step.items():
        size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) if group["bias_correction"] else lr
        part = batch if len(at_step) == 1 else batch.pick(rows)
        reduced = size * (1 - decay)
        if reduced > 0:
            _kernel(part, group, Scaling(scaling.grad_scale), lr=reduced, weight_decay=decay / reduced)
        else:
            _kernel(part, group, Scaling(scaling.grad_scale), lr=size, weight_decay=0.0)
            torch._foreach_mul_(part.params, 1 - decay)


def _update_transformers_on_device(batch: Batch, group: ParamGroup, scaling: Scaling) -> None:
    """Update by Hugging Face's AdamW, launch by launch, with steps counted on the device, for CUDA graphs."""
    _advance(batch.steps, scaling)
    for row, (param, step) in enumerate(zip(batch.params, batch.steps, strict=True)):
        beta1, beta2 = (torch.as_tensor(beta, device=param.device).reshape(()) for beta in group["betas"])
        lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=param.device).reshape(())
        size = lr
        if group["bias_correction"]:
            # At step zero, after a skipped first step, the quotient is NaN; the kernel does not use it then.
            size = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
        _kernel(batch.pick([row]), group, scaling, lr=size, weight_decay=0.0)
        if group["weight_decay"]:
            decay = lr * group["weight_decay"]
            if scaling.found_inf is not None:
                decay = decay * (1 - scaling.found_inf.to(param.device))
            param.sub_(param * decay.to(param.dtype))


def _advance(steps: list[Tensor], scaling: Scaling) -> None:
    if scaling.found_inf is None:
        torch._foreach_add_(steps, 1)
        return
    for step in steps:
        step.add_(1 - scaling.found_inf.to(step.device).reshape(()))


def _kernel(
    batch: Batch,
    group: ParamGroup,
    scaling: Scaling,
    *,
    lr: float | Tensor,
    weight_decay: float,
    steps: list[Tensor] | None = None,
) -> None:
    """Run PyTorch's fused update; without `steps` no bias is corrected."""
    if steps is None:
        infinity = {device: torch.full((), math.inf, device=device) for device in {p.device for p in batch.params}}
        steps = [infinity[param.device] for param in batch.params]
    beta1, beta2 = group["betas"]
    adam(
        batch.params,
        batch.grads,
        batch.exp_avgs,
        batch.exp_avg_sqs,
        batch.max_exp_avg_sqs,
        steps,
        fused=True,
        grad_scale=scaling.grad_scale,
        found_inf=scaling.found_inf,
        decoupled_weight_decay=group["adam_w_mode"] != AdamWMode.ADAM_L2_REGULARIZATION,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=group["maximize"],
    )
