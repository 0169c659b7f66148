"""Computes the fingerprint of a captured graph: a hash of all that decides what it is compiled to.

Graphs with equal fingerprints are compiled to the same. Whatever cannot be described for certain, such as a function of
a library whose code may change, raises `NotKeepable`, and the graph is compiled in each process.
"""

from __future__ import annotations

import enum
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, fx
from torch._dynamo import config as dynamo_settings
from torch._functorch import config as functorch_settings
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental import _config as shape_settings

import ort_accel
from ort_accel.graph_cache.pickling import MOST_BYTES, NotKeepable
from ort_accel.runtime.model_cache import processor

PACKAGES = ("accelerate", "numpy", "onnx", "onnx_ir", "onnxscript", "peft", "sympy", "transformers", "trl")
"""Packages whose versions are part of a fingerprint."""

VARIABLE_PREFIXES = (
    "ATEN_",
    "DNNL_",
    "GLIBC_",
    "KMP_",
    "MALLOC_",
    "MKL_",
    "ONEDNN_",
    "OMP_",
    "ORT_",
    "PYTORCH_",
    "TORCH",
)
"""Prefixes of environment variables that change how libraries compute or compile."""

FUNCTION_PACKAGES = {"torch", "_operator", "builtins", "math", "ort_accel"}
"""Packages whose functions are described by their name, as their versions or sources are in the fingerprint."""

OPERATOR_NAMESPACES = {"aten", "prim", "prims", "ort_accel", "mkldnn", "higher_order"}
"""Namespaces of operators of PyTorch and of the engine."""

PlainValue = (
    bool | int | str | bytes | complex | enum.Enum | torch.dtype | torch.device | torch.layout | torch.memory_format
)


def graph_key(module: fx.GraphModule, inputs: Sequence[Any], context: Sequence[Any]) -> str:
    """Return the fingerprint of a graph that was captured for these inputs; `context` is what else decides."""
    parts = [_software(), *map(repr, context), *_state(), *_graph(module), *_inputs(module, inputs)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _software() -> str:
    """Describe the engine's source and its native library, the versions of its dependencies, and the machine."""
    source = hashlib.sha256()
    root = Path(ort_accel.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.so")]):
        source.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    built = [torch.__version__, torch.version.git_version, sys.version, platform.machine(), *platform.libc_ver()]
    return "\n".join([source.hexdigest(), *versions, *built, processor(), torch.backends.cpu.get_cpu_capability()])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _state() -> Iterator[str]:
    """Describe the settings of this process: environment variables, PyTorch's modes and settings."""
    yield repr(sorted(item for item in os.environ.items() if item[0].startswith(VARIABLE_PREFIXES)))
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotKeepable("a function transform is active")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotKeepable("hooks on saved tensors are active")
    for device in ("cpu", "cuda"):
        yield f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    backends = torch.backends
    yield repr(
        [
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            backends.mkldnn.enabled,
            [switch() for switch in _attention_switches()],
        ]
    )
    for settings in (dynamo_settings, functorch_settings, shape_settings):
        values = [item for item in settings.get_config_copy().items() if item[0] != "debug_dir_root"]
        yield repr(sorted((name, value) for name, value in values if isinstance(value, bool | int | float | str)))


def _attention_switches() -> list[Callable[[], bool]]:
    cuda = torch.backends.cuda
    return [cuda.flash_sdp_enabled, cuda.math_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled]


def _graph(module: fx.GraphModule) -> Iterator[str]:
    """Describe the nodes of a graph, with the user's lines, and those of the graphs within it."""
    for node in module.graph.nodes:
        yield f"{node.op} {node.name} {_text(node.target)} {_text(node.args)} {_text(node.kwargs)}"
        yield str(node.meta.get("stack_trace"))
        yield repr([(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()])
        if node.op in ("get_attr", "call_module"):
            held = attrgetter(node.target)(module)
            if isinstance(held, fx.GraphModule):
                yield from _graph(held)
            elif isinstance(held, Tensor):
                yield _content(held)
            else:
                raise NotKeepable(f"the graph holds a {type(held).__name__}")


def _content(held: Tensor) -> str:
    if type(held) not in (Tensor, torch.nn.Parameter) or held.nbytes > MOST_BYTES or held.device.type != "cpu":
        raise NotKeepable(f"the graph holds a {type(held).__name__} of {held.nbytes} bytes")
    numbers = held.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{_sizes_and_type(held)} {hashlib.sha256(numbers).hexdigest()}"


def _inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """Describe the inputs: their sizes and types, which of them share memory, and what is known of dynamic sizes."""
    memory: dict[int, int] = {}
    shapes = None
    placeholders = module.graph.find_nodes(op="placeholder")
    for position, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        name = getattr(getattr(node, "_dynamo_source", None), "name", None)
        yield f"{position} {name() if callable(name) else name}"  # a method before torch 2.12
        yield repr(sorted((node.meta.get("tensor_dict") or {}).keys()))
        if isinstance(value, torch.SymInt):
            shapes = value.node.shape_env
            yield f"{value.node.expr}"
        elif isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise NotKeepable(f"an input is a {type(value).__name__}")
            fake = node.meta["example_value"]
            shapes = fake.fake_mode.shape_env if shapes is None else shapes
            first_position = memory.setdefault(value.untyped_storage()._cdata, position)
            flags = (value.is_leaf, value.is_inference(), value._is_view(), value.is_conj(), value.is_neg())
            yield f"{type(value).__name__} {_sizes_and_type(fake)} {value.requires_grad} {first_position} {flags}"
        elif isinstance(value, PlainValue | float) or value is None:
            yield _text(value)
        else:
            raise NotKeepable(f"an input is a {type(value).__name__}")
    if shapes is not None:
        yield repr([str(guard.expr) for guard in shapes.guards])
        yield repr(sorted((str(symbol), str(span)) for symbol, span in shapes.var_to_range.items()))
        yield repr(sorted((str(symbol), str(put)) for symbol, put in shapes.replacements.items()))


def _sizes_and_type(tensor: Tensor) -> str:
    sizes = [str(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    return f"{sizes} {tensor.dtype} {tensor.device} {tensor.layout}"


def _text(value: object) -> str:
    """Describe a target or an argument completely."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if value is None or value is Ellipsis or isinstance(value, PlainValue | float):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"sym {value.node.expr}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice[{_text(value.start)}, {_text(value.stop)}, {_text(value.step)}]"
    if isinstance(value, OpOverload | OpOverloadPacket):
        return _operator(str(value))
    if isinstance(value, HigherOrderOperator):
        return f"higher_order.{value._name}"
    return _function(value)


def _operator(name: str) -> str:
    """Return an operator's name, if the versions in the fingerprint decide what it does."""
    library = name.partition(".")[0]
    if library not in OPERATOR_NAMESPACES and library not in PACKAGES:
        raise NotKeepable(f"{name} is an operator of another library")
    if library in PACKAGES and not _is_released(library):
        raise NotKeepable(f"{name} is an operator of {library} {_version(library)}, which is not a release")
    return name


def _is_released(package: str) -> bool:
    """True if a package's version stands for its code: no development version, and not installed from a folder."""
    try:
        found = distribution(package)
        parsed = Version(found.version)
    except (PackageNotFoundError, InvalidVersion):
        return False
    return not parsed.is_devrelease and parsed.local is None and found.read_text("direct_url.json") is None


def _function(value: object) -> str:
    """Return the name of a function of PyTorch or of Python, or of a method of a class of theirs."""
    name = getattr(value, "__qualname__", "")
    module: str = getattr(value, "__module__", None) or getattr(value, "__objclass__", object).__module__ or ""
    if not callable(value) or not name or "<" in name or module.partition(".")[0] not in FUNCTION_PACKAGES:
        raise NotKeepable(f"{name or type(value).__name__} is no function of PyTorch")
    return f"{module}.{name}"
