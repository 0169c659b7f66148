"""Training steps of many architectures: eager PyTorch, Inductor, and ort_accel without and with generated kernels.

Every architecture runs in a process of its own, and the results are written as they come. Models have random weights
and no dropout, and every token is valid. See `--help`.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor, nn
from transformers.models.auto import configuration_auto

import ort_accel
from benchmarks.tiny_models import configured
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import (
    EAGER,
    INDUCTOR,
    ORT_ACCEL,
    Trace,
    distances,
    forget_gradients,
    step,
    trace,
)
from ort_accel.cli.benchmark.timing import in_turns
from ort_accel.generated.takeover import RECORDS
from ort_accel.reporting.report import Report
from ort_accel.reporting.timings import KERNELS_AWAITED, KERNELS_READY, KERNELS_TRIED

WITHOUT = "ort_accel, without generated kernels"
COMPILE_SECONDS, LIMIT_SECONDS = 400, 800
"""The longest wait for generated kernels, and the longest time of an architecture."""
ALLOWED = 2e-3
"""The largest distance of a gradient from that in double precision, as a share of its norm, if eager's is no larger."""
VOCABULARY, CLASSES, SIDE = 8000, 10, 96

CAUSAL, MASKED, SEQ2SEQ, IMAGES, SPEECH = "CausalLM", "MaskedLM", "seq2seq", "images", "speech"

ARCHITECTURES: dict[str, tuple[str, str]] = {
    "bert": ("BertForMaskedLM", MASKED),
    "roberta": ("RobertaForMaskedLM", MASKED),
    "electra": ("ElectraForMaskedLM", MASKED),
    "distilbert": ("DistilBertForMaskedLM", MASKED),
    "albert": ("AlbertForMaskedLM", MASKED),
    "mpnet": ("MPNetForMaskedLM", MASKED),
    "deberta-v2": ("DebertaV2ForMaskedLM", MASKED),
    "modernbert": ("ModernBertForMaskedLM", MASKED),
    "funnel": ("FunnelForMaskedLM", MASKED),
    "gpt2": ("GPT2LMHeadModel", CAUSAL),
    "gpt_neox": ("GPTNeoXForCausalLM", CAUSAL),
    "opt": ("OPTForCausalLM", CAUSAL),
    "bloom": ("BloomForCausalLM", CAUSAL),
    "phi3": ("Phi3ForCausalLM", CAUSAL),
    "llama": ("LlamaForCausalLM", CAUSAL),
    "mistral": ("MistralForCausalLM", CAUSAL),
    "qwen2": ("Qwen2ForCausalLM", CAUSAL),
    "qwen3": ("Qwen3ForCausalLM", CAUSAL),
    "gemma": ("GemmaForCausalLM", CAUSAL),
    "gemma2": ("Gemma2ForCausalLM", CAUSAL),
    "gemma3_text": ("Gemma3ForCausalLM", CAUSAL),
    "cohere": ("CohereForCausalLM", CAUSAL),
    "granite": ("GraniteForCausalLM", CAUSAL),
    "olmo2": ("Olmo2ForCausalLM", CAUSAL),
    "stablelm": ("StableLmForCausalLM", CAUSAL),
    "falcon": ("FalconForCausalLM", CAUSAL),
    "smollm3": ("SmolLM3ForCausalLM", CAUSAL),
    "mixtral": ("MixtralForCausalLM", CAUSAL),
    "qwen3_moe": ("Qwen3MoeForCausalLM", CAUSAL),
    "deepseek_v3": ("DeepseekV3ForCausalLM", CAUSAL),
    "gpt_oss": ("GptOssForCausalLM", CAUSAL),
    "mamba": ("MambaForCausalLM", CAUSAL),
    "mamba2": ("Mamba2ForCausalLM", CAUSAL),
    "rwkv": ("RwkvForCausalLM", CAUSAL),
    "t5": ("T5ForConditionalGeneration", SEQ2SEQ),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ),
    "vit": ("ViTForImageClassification", IMAGES),
    "deit": ("DeiTForImageClassification", IMAGES),
    "beit": ("BeitForImageClassification", IMAGES),
    "dinov2": ("Dinov2ForImageClassification", IMAGES),
    "swin": ("SwinForImageClassification", IMAGES),
    "convnext": ("ConvNextForImageClassification", IMAGES),
    "convnextv2": ("ConvNextV2ForImageClassification", IMAGES),
    "resnet": ("ResNetForImageClassification", IMAGES),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", SPEECH),
    "hubert": ("HubertForSequenceClassification", SPEECH),
    "whisper": ("WhisperForConditionalGeneration", SPEECH),
}
"""Model types, their classes, and what they are trained on."""


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


MEDIUM: dict[str, Any] = {
    **_each("vocab_size", VOCABULARY),
    "num_labels": CLASSES,
    **_each("pad_token_id", 0),
    **_each("bos_token_id decoder_start_token_id", 1),
    **_each("eos_token_id", 2),
    "forced_bos_token_id": None,
    **_each("max_position_embeddings n_positions context_length", 512),
    **_each("max_source_positions max_target_positions", 256),
    **_each("hidden_size n_embd d_model embedding_size dim word_embed_proj_dim attention_hidden_size", 256),
    **_each("intermediate_size n_inner d_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim", 1024),
    **_each("moe_intermediate_size", 256),
    **_each("q_lora_rank kv_lora_rank", 64),
    **_each("qk_rope_head_dim qk_nope_head_dim", 32),
    **_each("head_dim d_kv v_head_dim", 64),
    **_each("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers", 4),
    **_each("num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads", 4),
    **_each("num_key_value_heads num_experts_per_tok", 2),
    **_each("num_local_experts num_experts n_routed_experts", 4),
    **_each("n_group topk_group", 1),
    "sliding_window": 64,
    "state_size": 16,
    "image_size": SIDE,
    **_each("patch_size", 16),
    "num_mel_bins": 80,
    **_each("apply_spec_augment use_cache", False),
    **_each("layerdrop encoder_layerdrop decoder_layerdrop activation_dropout feat_proj_dropout final_dropout", 0.0),
    **_each("attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob dropout", 0.0),
    **_each("resid_pdrop embd_pdrop attn_pdrop dropout_rate classifier_dropout attention_dropout_prob", 0.0),
    **_each("drop_path_rate embedding_dropout mlp_dropout classifier_dropout_prob", 0.0),
}
OF_KIND: dict[str, dict[str, Any]] = {
    "convnext": {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 4, 2], "patch_size": 4},
    "deepseek_v3": {"head_dim": 32, "num_key_value_heads": 4},
    "distilbert": {"hidden_dim": 1024, "dim": 256},
    "funnel": {"block_sizes": [2, 2], "block_repeats": [1, 1]},
    "mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 1, "chunk_size": 32},
    "resnet": {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2] * 4, "layer_type": "basic"},
    "swin": {"embed_dim": 48, "depths": [2, 2, 4], "num_heads": [2, 4, 8], "window_size": 6, "patch_size": 4},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
}


def built(kind: str) -> nn.Module:
    """Returns a model of some million parameters, with random weights."""
    torch.manual_seed(0)
    name, _ = ARCHITECTURES[kind]
    model_class = getattr(transformers, name)
    usual = (model_class.config_class or configuration_auto.CONFIG_MAPPING[kind])()
    model: nn.Module = model_class(configured(usual, MEDIUM, OF_KIND.get(kind)))
    return model.train()


def batch_of(kind: str, number: int) -> dict[str, Tensor]:
    """Returns a batch, another one for each number."""
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(5, VOCABULARY, (4, 128), generator=random)
    labels = torch.randint(0, CLASSES, (8,), generator=random)
    match ARCHITECTURES[kind][1]:
        case "images":
            return {"pixel_values": torch.randn(8, 3, SIDE, SIDE, generator=random), "labels": labels}
        case "speech" if kind == "whisper":
            return {"input_features": torch.randn(4, 80, 512, generator=random), "labels": ids[:, :32]}
        case "speech":
            return {"input_values": torch.randn(4, 16_000, generator=random), "labels": labels[:4]}
        case "seq2seq":
            return {"input_ids": ids, "labels": torch.randint(5, VOCABULARY, (4, 64), generator=random)}
        case "MaskedLM":
            return {"input_ids": ids, "labels": ids}
    if "mamba" in kind or kind == "rwkv":
        ids = ids[:, :64]
    return {"input_ids": ids, "labels": ids}


def measured(kind: str, rounds: int) -> dict[str, Any]:
    """Returns the seconds of all contenders' steps, and what is wrong with their gradients."""
    models = {EAGER: built(kind)}
    models |= {name: copy.deepcopy(models[EAGER]) for name in (INDUCTOR, WITHOUT, ORT_ACCEL)}
    models[INDUCTOR].compile()
    for name, generated in ((WITHOUT, False), (ORT_ACCEL, True)):
        engine = {"compare_with_eager": False, "fallback": "report"}
        config = {"engine": engine, "compute": {"generated": {"enabled": generated}}, "observe": {"log_level": "error"}}
        ort_accel.accelerate(models[name], config)
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in models[EAGER].parameters()), "first step": {}}
    for name, model in models.items():
        began = time.perf_counter()
        step(model, batch_of(kind, 0), "fp32")
        found["first step"][name] = time.perf_counter() - began
    report = ort_accel.report(models[ORT_ACCEL])
    found["seconds to kernels"] = _wait_for_kernels(kind, models[ORT_ACCEL], report)
    right = _exact(kind, models[EAGER])
    found["distance"] = {
        name: max(distances(trace(model, batch_of(kind, 1), "fp32"), right).values()) for name, model in models.items()
    }
    numbers = {name: iter(range(2, 10_000)) for name in models}

    def run(name: str) -> None:
        forget_gradients(models[name])
        step(models[name], batch_of(kind, next(numbers[name])), "fp32")

    seconds = in_turns({name: partial(run, name) for name in models}, rounds, 2)
    found["seconds"] = {name: median(times) for name, times in seconds.items()}
    found["all seconds"] = seconds
    found |= {counter: report.counters[counter] for _, counter, _ in RECORDS}
    found["races"] = [race.seconds | {"graph": race.graph, "nodes": race.count} for race in report.races]
    found["notes"] = report.notes
    return found


def _exact(kind: str, eager: nn.Module) -> Trace:
    """Returns a step in double precision; in single precision where a model has no kernels for that."""
    batch = batch_of(kind, 1)
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    try:
        return trace(copy.deepcopy(eager).double(), doubled, "fp32")
    except RuntimeError:
        return trace(eager, batch, "fp32")


def _wait_for_kernels(kind: str, model: nn.Module, report: Report) -> float:
    """Trains until generated kernels were tried, or for the longest wait; returns the seconds that it took."""
    began, numbers = time.perf_counter(), iter(range(100_000, 200_000))
    settled = 0
    while (spent := time.perf_counter() - began) < COMPILE_SECONDS and settled < 4:
        forget_gradients(model)
        step(model, batch_of(kind, next(numbers)), "fp32")
        counters = report.counters
        is_over = not counters[KERNELS_AWAITED] and counters[KERNELS_TRIED] == counters[KERNELS_READY]
        settled = settled + 1 if is_over else 0
    return spent


def architectures(
    only: Annotated[list[str] | None, typer.Option(help="Only these model types; give it several times.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 10,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure training steps of many architectures."""
    if one is not None:
        typer.echo(json.dumps(measured(one, rounds)))
        return
    found: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads())}
    for kind in only or list(ARCHITECTURES):
        found[kind] = _in_process(kind, rounds)
        typer.echo(f"{kind:14}{_line(found[kind])}")
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    typer.echo(_summary([each for kind, each in found.items() if "seconds" in each]))
    typer.echo(machine.in_short(found["machine"]))


def _in_process(kind: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", kind, "--rounds", str(rounds)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {LIMIT_SECONDS} s"}
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        errors = run.stderr.strip().splitlines()
        return {"error": errors[-1] if errors else f"it ended with {run.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"  {found['error']}"
    seconds, ours = found["seconds"], found["seconds"][ORT_ACCEL]
    best = min(seconds[EAGER], seconds[INDUCTOR])
    times = "".join(f"{1e3 * seconds[name]:9.1f}" for name in (EAGER, INDUCTOR, WITHOUT, ORT_ACCEL))
    allowed = max(ALLOWED, found["distance"][EAGER])
    wrong = "  WRONG" if max(found["distance"][name] for name in (WITHOUT, ORT_ACCEL)) > allowed else ""
    return f"{times} ms  {seconds[EAGER] / ours:6.2f}x eager  {best / ours:6.2f}x the better{wrong}"


def _summary(found: Sequence[dict[str, Any]]) -> str:
    """Returns the medians of the ratios over all architectures."""
    if not found:
        return "nothing was measured"
    of_eager = [each["seconds"][EAGER] / each["seconds"][ORT_ACCEL] for each in found]
    of_better = [min(each["seconds"][EAGER], each["seconds"][INDUCTOR]) / each["seconds"][ORT_ACCEL] for each in found]
    behind = sum(ratio < 1 / 1.03 for ratio in of_better)
    return f"{len(found)} architectures: median {median(of_eager):.2f}x eager; {behind} slower than the better of both"


if __name__ == "__main__":
    typer.run(architectures)
