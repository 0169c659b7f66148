"""`compute:` doing less work, and doing the rest with the fastest kernel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Row, conflict, cuda_only
from ort_accel.config.values import FilePath, Section, Switch
from ort_accel.reporting.report import State


class Generated(Section):
    """Kernels that are generated while a model trains: one for several neighbouring operators that no library has a
    kernel for (cpu only)."""

    enabled: Annotated[
        Switch,
        conflict(
            lambda wish, deterministic: wish is True and deterministic is True,
            "times decide which kernels run, and engine.deterministic asks for the same bits; write auto or false",
            "engine.deterministic",
        ),
        conflict(
            lambda wish, native: wish is True and not native,
            "sessions call these kernels, and compute.native is false; write auto or false",
            "compute.native",
        ),
        conflict(
            lambda wish, provider: wish is True and provider == "cuda",
            "kernels are generated on the CPU, and engine.provider is cuda; write auto or false",
            "engine.provider",
        ),
    ] = "auto"
    """Let PyTorch's Inductor write such kernels, and later programs for whole segments. They are compiled in the
    background, and a segment uses them once they are there and its runs with them are faster. `auto` begins after ten
    seconds of training, if kernels can save enough, and with programs two minutes later; `true` begins at once, and is
    an error where no kernels can be generated."""

    ops_file: Annotated[
        FilePath | None,
        conflict(
            lambda file, enabled: file is not None and enabled is False,
            "nothing is generated while compute.generated.enabled is false; write auto or true there",
            "compute.generated.enabled",
        ),
        NO_ROW,
    ] = None
    """A JSON file with a list of the operators that generated kernels may contain, such as `["aten.mul.Tensor"]`.
    `null` takes all that are supported."""

    debug: Annotated[
        bool,
        conflict(
            lambda debug, enabled: debug and enabled is False,
            "there are no kernels to keep while compute.generated.enabled is false; write auto or true there",
            "compute.generated.enabled",
        ),
        conflict(
            lambda debug, folder: debug and folder is None,
            "kernels are kept beside the saved models, and none are saved; name a folder in engine.save_onnx",
            "engine.save_onnx",
        ),
        NO_ROW,
    ] = False
    """Keep the generated kernels' C++, and the operators that they compute, beside the saved models."""

    workers: Annotated[int, Field(ge=1, le=16), NO_ROW] = 1
    """The most processes that compile kernels at once. Training goes first: they have a low priority."""


class Tuning(Section):
    """Measuring alternatives on the real shapes and keeping the fastest."""

    enabled: Annotated[bool, Row("each graph is measured when it is compiled")] = False
    """Time ONNX Runtime against PyTorch for each part that both can run, and keep the fastest division of each graph.
    Takes the time of some forty steps, so it is for long runs."""

    max_duration_ms: Annotated[
        int,
        Field(ge=0, le=3_600_000),
        conflict(
            lambda duration, enabled: duration and not enabled,
            "nothing is measured while compute.tuning.enabled is false; write true there, or remove this",
            "compute.tuning.enabled",
        ),
        NO_ROW,
    ] = 0
    """The most time that measuring may take in all; 0 sets no limit. What is not reached keeps the default choice."""

    results: Annotated[
        FilePath | None,
        conflict(
            lambda file, enabled: file is not None and not enabled,
            "measurements are neither made nor used while compute.tuning.enabled is false; write true there",
            "compute.tuning.enabled",
        ),
        NO_ROW,
    ] = None
    """A file to load earlier measurements from, if it is there, and to save new ones to; `null` takes `tuning.json` in
    `engine.cache_dir`. They hold for the same graph, machine and versions only."""


class Compute(Section):
    """Doing less work, and doing the rest with the fastest kernel."""

    upstream: bool = True
    """Move slices, gathers and reshapes up towards the inputs, through whatever works row by row, so that rows that are
    thrown away later are not computed."""

    placement: Literal["auto", "fixed", "onnxruntime"] = "auto"
    """Sets who runs the operators that ONNX Runtime and PyTorch can both run (cpu only). `auto` times the most frequent
    ones in both, once in a process, and large products at their own sizes. PyTorch then runs what it runs faster on
    this machine. `fixed` follows figures of one machine, so that every run divides the work alike; so do
    `engine.deterministic` and the keys of `memory` that save memory. `onnxruntime` lets ONNX Runtime run all it can.
    `tuning` measures each graph on its real sizes instead."""

    native: Annotated[bool, Row("PyTorch's kernels are called from ONNX Runtime's sessions")] = True
    """Let ONNX Runtime run whole graphs: operators that it lacks, or runs slower, are calls of PyTorch's operators from
    within its session (cpu only). Without the native library, and with `false`, PyTorch runs them between
    sessions."""

    fusions: Switch = "auto"
    """Join neighbouring operators into one kernel. `auto` joins where that was measured to be faster; `false` helps to
    hunt a numerical difference."""

    attention: Literal["auto", "fused", "flash", "efficient", "products"] = "auto"
    """The kernel of `scaled_dot_product_attention`. `fused` keeps it one node, `flash` and `efficient` insist on that
    variant, `products` writes it as matrix products and a softmax. `auto` decides as PyTorch does. One node in fp32 on
    the CPU runs the native library's kernel."""

    conv_algorithm: Annotated[
        Literal["default", "heuristic", "exhaustive"], cuda_only("exhaustive", "write heuristic")
    ] = "heuristic"
    """The search of cuDNN for convolution kernels (cuda only): `exhaustive` tries all on the first step, for vision
    models that train long. It is an error for a model on the CPU."""

    loss_only: Switch = "auto"
    """In training, compute the loss without keeping the logits when nobody reads them; and where the loss is outside
    of the model, the embedding of a sentence without those of its tokens. `auto` finds out; `true` refuses a training
    set-up that reads them, `false` always makes them."""

    loss_in_graph: Annotated[
        Switch, Row("no loss outside of the model was seen yet", State.OFF, off="switched off")
    ] = "auto"
    """In training, compile a loss that a Trainer computes from the model's outputs (label smoothing,
    `compute_loss_func`) together with the model, so that rows without a label need not be computed. `auto` does so
    where nothing speaks against it, `true` makes that an error. An overridden `compute_loss` stays outside."""

    generated: Generated = Generated()

    tuning: Tuning = Tuning()
