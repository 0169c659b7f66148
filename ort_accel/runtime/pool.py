"""Emptying the pool of memory that all sessions share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ort_accel.runtime.imported import onnxruntime
from ort_accel.runtime.place import CPU
from ort_accel.runtime.session import SessionSettings, share_memory_pool


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
