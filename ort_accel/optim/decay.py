"""The parameters that weight decay applies to: matrices, but neither biases nor the scales of norms."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ort_accel.optim.adam_update import ParamGroup

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm)
_NORM_NAME = re.compile(r"norm", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(^|_)bias(_|$)", re.IGNORECASE)


def decayed(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that weight decay applies to, in the model's order.

    It does not apply to biases and to parameters of PyTorch's norms. Nor does it apply to vectors with "norm" in their
    name, or in the name of their module's class or an ancestor of it (`LlamaRMSNorm`, `T5LayerNorm`).
    """
    exempt = {id(param) for module in model.modules() for param in _exempt(module)}
    return [name for name, param in model.named_parameters() if id(param) not in exempt]


def decay_groups(model: nn.Module, weight_decay: float) -> list[ParamGroup]:
    """Returns two parameter groups for an optimizer, with and without decay. Frozen parameters are in neither."""
    names = set(decayed(model))
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if name in names], "weight_decay": weight_decay},
        {"params": [param for name, param in trained if name not in names], "weight_decay": 0.0},
    ]


def _exempt(module: nn.Module) -> Iterator[nn.Parameter]:
    is_norm = any(_NORM_NAME.search(kind.__name__) for kind in type(module).__mro__)
    for name, param in module.named_parameters(recurse=False):
        belongs_to_norm = isinstance(module, _NORMS) or (param.dim() <= 1 and (is_norm or _NORM_NAME.search(name)))
        if belongs_to_norm or _BIAS_NAME.search(name):
            yield param
