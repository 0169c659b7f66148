"""`engine:` the ONNX Runtime that runs the model, and the ways out where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ort_accel.config.declaration import NO_ROW, Constraint, Row, conflict
from ort_accel.config.values import FilePath, Section, Switch

OperatorName = Annotated[str, Field(pattern=r"^\w+\.\w+(\.\w+)?$", examples=["aten.gelu"])]

DECIDED_ELSEWHERE = {
    "device_id": "the device is the model's: model.to('cuda:1')",
    "user_compute_stream": "the stream is PyTorch's: torch.cuda.stream(...)",
    "has_user_compute_stream": "the stream is PyTorch's: torch.cuda.stream(...)",
    "gpu_external_alloc": "write memory.external_allocator",
    "gpu_external_free": "write memory.external_allocator",
    "gpu_external_empty_cache": "write memory.external_allocator",
    "cudnn_conv_algo_search": "write compute.conv_algorithm",
}
"""Options of the CUDA provider that other settings decide, and these settings."""


def _options_decided_elsewhere(options: Mapping[str, object]) -> str | None:
    owned = [f"{name} ({DECIDED_ELSEWHERE[name]})" for name in options if name in DECIDED_ELSEWHERE]
    return f"decided elsewhere: {', '.join(owned)}; remove it here" if owned else None


class Engine(Section):
    """The ONNX Runtime that runs the model, and the ways out where it cannot."""

    enabled: Annotated[bool, NO_ROW] = True
    """Run forward and backward on ONNX Runtime. `false` leaves the model plain PyTorch, whatever else the file says;
    use it to compare with one changed line."""

    runtime: Annotated[Literal["auto", "onnxruntime", "onnxruntime-training"], NO_ROW] = "auto"
    """The onnxruntime that must be installed. `auto` takes the one that is there. Name one to make a wrong environment
    an error instead of a slower run."""

    provider: Annotated[Literal["auto", "cpu", "cuda"], NO_ROW] = "auto"
    """The execution provider. `auto` follows the device of the model's parameters; another provider than that of the
    device is an error, and so is an onnxruntime that lacks it."""

    provider_options: Annotated[
        dict[str, str | int | float | bool],
        conflict(
            lambda options, provider: options and provider == "auto",
            "these options belong to one provider, and engine.provider is auto; name the provider: cpu, cuda",
            "engine.provider",
        ),
        conflict(
            lambda options, provider: options and provider == "cpu",
            "ONNX Runtime's CPU provider takes no options; engine.threads is the key for its threads",
            "engine.provider",
        ),
        Constraint(_options_decided_elsewhere),
    ] = {}
    """Options handed to the named provider as they are, such as `{gpu_mem_limit: 8589934592}` for cuda.
    Needs `provider` to be named; cpu takes none. Device, stream, allocator and convolution search are decided
    elsewhere, and not to be named here."""

    threads: Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=1024)], NO_ROW] = "auto"
    """Threads that ONNX Runtime computes with. `auto` takes as many as PyTorch has (`torch.get_num_threads()`).
    Lower it when several processes share a machine."""

    dynamic_shapes: Switch = "auto"
    """Let one compiled graph serve all sizes. `auto` compiles for the first shape, then once more with every size
    that was seen to change kept open; at once where a data loader tells beforehand that sizes will change. `true` keeps
    sizes open from the start; `false` compiles each shape on its own, for runs whose shapes never change."""

    compile_evaluation: Annotated[Switch, NO_ROW] = "auto"
    """Compile calls without gradients. Without a training `auto` does so at once. During a training it
    does so once these calls have taken as long in eager mode as compiling is expected to take. On CUDA, with
    `deterministic`, `fallback: error` or a `placement`, and where memory is saved, `auto` compiles at once. `true`
    always does, and `false` leaves the calls to eager mode. Steps of `generate` run in eager mode."""

    compare_with_eager: Annotated[Literal["auto", False], NO_ROW] = "auto"
    """Compare training steps with eager PyTorch's. `auto` lets the engine and eager mode take turns for
    some steps, goes on with the faster one, and compares them again from time to time; a model whose steps take
    milliseconds begins in eager mode until compiling it pays. Random numbers and gradients are eager's either way, up
    to rounding. It compares nothing with `fallback: error`, `deterministic`, a `placement`, tuning, `save_onnx`,
    density or `loss_only` set to true, or with a `memory` key that saves memory. `false` lets the engine run every
    step."""

    fallback: Literal["warn", "report", "error"] = "warn"
    """Sets how parts that ONNX Runtime cannot run are reported. PyTorch runs them outside ONNX Runtime's sessions;
    `warn` says so once in the log, `report` only in the report, `error` stops with a list of all of them. Choose
    `error` when every operator must run in a session. Sessions may call PyTorch's kernels (`compute.native`)."""

    fallback_retry: Annotated[bool, NO_ROW] = True
    """After a part failed at run time (out of memory, say) and PyTorch took it over, try ONNX Runtime again on the next
    step. `false` leaves that part to PyTorch for the rest of the run."""

    run_in_pytorch: Annotated[tuple[OperatorName, ...], Field(strict=False), Row("{0}")] = ()
    """Operators that PyTorch must run, as they are named in the report (`aten.gelu`, `aten.topk.default`). Use it to
    take one suspected operator out when hunting a difference."""

    opset: Annotated[Literal["auto"] | Annotated[int, Field(ge=17, le=25)], NO_ROW] = "auto"
    """The ONNX operator set of the models. `auto` takes the newest that the installed onnxruntime runs. Name one to
    read the saved models with an older tool."""

    cache_dir: Annotated[FilePath | None, Row("what is compiled is kept in {0}")] = None
    """A folder that keeps compiled graphs and models between runs, so that the next start is fast, and remembers what
    ended a run within ONNX Runtime. It may be shared by processes and users; `null` keeps nothing."""

    save_onnx: Annotated[FilePath | None, Row("models are written to {0}")] = None
    """A folder to write the ONNX models to, before and after optimization, for reading them in a viewer. `null` writes
    none."""

    onnx_prefix: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=100, examples=["ort_accel"]), NO_ROW] = (
        "ort_accel"
    )
    """The first part of the names of files in `save_onnx`. Change it to tell several models in one folder apart."""

    deterministic: Switch = "auto"
    """Make two runs with the same seed give the same bits. `auto` follows
    `torch.are_deterministic_algorithms_enabled()`; `true` may cost speed: nothing is decided by measuring."""

    custom_autograd: Annotated[bool, NO_ROW] = True
    """Run `torch.autograd.Function`s inside the model with the backward that they define. `false` refuses a model that
    has one."""

    allow_checkpoint: Annotated[bool, NO_ROW] = True
    """Accept `torch.utils.checkpoint` (gradient checkpointing) inside the model. `false` makes it an error, for runs
    where `memory` alone should decide what is recomputed."""
