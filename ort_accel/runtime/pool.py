"""The pool of memory that all sessions share: emptying it, and taking memory from it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from ort_accel.runtime.imported import onnxruntime
from ort_accel.runtime.place import CPU
from ort_accel.runtime.session import Session, SessionSettings, share_memory_pool
from ort_accel.runtime.tensors import sizes_to_ort


def release_unused() -> None:
    """Give back what ONNX Runtime's pool holds and nobody uses. A later run asks for it again, which takes time."""
    session, options = _shrinking()
    session.run(None, {"given": np.zeros(1, np.float32)}, options)


@cache
def _shrinking() -> tuple[Any, Any]:
    """A model that does nothing, and options with which a run shrinks the pool when it ends."""
    from onnx import TensorProto, helper

    given, same = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("given", "same"))
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["same"])], "nothing", [given], [same])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    share_memory_pool(CPU)
    settings = SessionSettings(threads=1).options()
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return session, options


def pooled_zeros(rows: int, width: int) -> torch.Tensor:
    """Zeros in single precision, in memory that goes back to the pool when the tensor is gone."""
    return _zeros()([sizes_to_ort([rows, width], scalar=False)])[0]


@cache
def _zeros() -> Session:
    """A model whose result has the sizes it is given. Sizes that it knew would make of the result a constant, which all
    runs share."""
    from onnx import TensorProto, helper

    sizes = helper.make_tensor_value_info("sizes", TensorProto.INT64, [2])
    zeros = helper.make_tensor_value_info("zeros", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph([helper.make_node("ConstantOfShape", ["sizes"], ["zeros"])], "zeros", [sizes], [zeros])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Session(model.SerializeToString(), ["sizes"], ["zeros"], SessionSettings(threads=1))
