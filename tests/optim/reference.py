"""Adam's three rules written down as they are defined, one parameter at a time, in float64."""

import torch


def reference_adam(grads, start, mode, *, lr, betas, eps, weight_decay, bias_correction=True, amsgrad=False):
    """The parameter after each of the gradients."""
    p, m, v, v_max = start.double().clone(), 0.0, 0.0, torch.zeros_like(start, dtype=torch.float64)
    for step, grad in enumerate(grads, start=1):
        g = grad.double() + (weight_decay * p if mode == 0 else 0.0)
        if mode == 2:
            p = p - lr * weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        v_max = torch.maximum(v_max, v) if amsgrad else v
        bc1, bc2 = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1.0, 1.0)
        if mode == 1:
            p = p - lr * bc2**0.5 / bc1 * m / (v_max.sqrt() + eps)
            p = p - lr * weight_decay * p
        else:
            p = p - lr * (m / bc1) / ((v_max / bc2).sqrt() + eps)
    return p
