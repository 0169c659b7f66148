"""Runs a captured graph in eager mode.

Dynamo captures a checkpointed part as an operator for AOTAutograd. Called in eager mode, that operator draws other
random numbers in its recomputation than in its forward, so its gradients would be wrong. Private to torch; checked with
torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

from ort_accel.runtime.work_count import WORK


def eager_function(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that gives a graph's results, and the gradients of the script's own lines."""
    has_checkpoints = any(node.target is tag_activation_checkpoint for node in module.graph.nodes)
    return partial(_run, module, has_checkpoints)


def _run(module: fx.GraphModule, has_checkpoints: bool, *inputs: Any) -> Any:
    WORK.missed()
    return _Checkpointing(module).run(*inputs) if has_checkpoints else module(*inputs)


class _Checkpointing(fx.Interpreter):
    """Runs a graph whose checkpointed parts are recomputed in the backward with the same random numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # a bad batch raises eager mode's error, without a dump of the graph

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not tag_activation_checkpoint:
            return super().run_node(n)
        (body, *inputs), _ = self.fetch_args_kwargs_from_env(n)
        return checkpoint(eager_function(body), *inputs, use_reentrant=False)
