"""One of two processes that train with DeepSpeed; what it sees goes to a JSON file. Started by test_deepspeed.py."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedOptimizerWrapper
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import ort_accel
from ort_accel.errors import OptimizerError
from ort_accel.hf import ORTTrainer, ORTTrainingArguments
from ort_accel.optim import FP16_Optimizer
from ort_accel.reporting.fallbacks import Reason
from ort_accel.run import end

CHECKS = ("has_overflow_partitioned_grads_serial", "get_grad_norm_direct")


def engine_for(stage, precision=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    if precision is not None:
        config[precision] = {"enabled": True}
    if precision == "fp16":
        # So high a scale that the first steps overflow.
        config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 5}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine, optimizer


def train(engine, optimizer, rank):
    generator = torch.Generator().manual_seed(rank)
    dtype = next(engine.module.parameters()).dtype
    seen = []
    for _ in range(30):
        batch = torch.randn(4, 6, generator=generator).to(dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        norm = float(getattr(optimizer, "_global_grad_norm", 0.0))
        seen.append((loss.item(), norm, optimizer.overflow, float(optimizer.loss_scale)))
    return seen


def compare(stage, precision, rank):
    """A run with DeepSpeed's own checks, and one with ours in their place, inside Accelerate's wrapper."""
    theirs = train(*engine_for(stage, precision), rank)
    engine, optimizer = engine_for(stage, precision)
    calls = []
    wrapped = DeepSpeedOptimizerWrapper(optimizer)
    is_same = FP16_Optimizer(wrapped) is wrapped
    for name in CHECKS:
        ours = getattr(optimizer, name)
        setattr(optimizer, name, lambda *args, _ours=ours, **named: calls.append(1) or _ours(*args, **named))
    return {"theirs": theirs, "mine": train(engine, optimizer, rank), "same": is_same, "calls": len(calls)}


def refusals(rank):
    answers = {}
    _, optimizer = engine_for(2, "bf16")
    if rank == 1:
        original = optimizer.get_grad_norm_direct
        optimizer.get_grad_norm_direct = lambda *args, **named: original(*args, **named) * 2
    FP16_Optimizer(optimizer)
    answers["replaced"] = [name for name in CHECKS if getattr(getattr(optimizer, name), "_from_ort_accel", False)]
    _, stage_3 = engine_for(3, "bf16")
    try:
        FP16_Optimizer(stage_3)
    except OptimizerError as error:
        answers["stage 3"] = str(error)
    return answers


def losses_of(*trained):
    return [loss for loss, *_ in train(*trained)]


def early_gradients(rank):
    """ZeRO-2 without and with gradients that reach it while the backward of the engine runs."""
    stock = losses_of(*engine_for(2), rank)
    engine, optimizer = engine_for(2)
    wish = {"memory": {"early_gradient_release": True}, "compute": {"attention": "products"}}
    model = ort_accel.accelerate(engine.module, wish)
    given = losses_of(engine, optimizer, rank)
    report = ort_accel.report(model)
    effect = report.features["memory.early_gradient_release"].effect
    breaks = [item.op for item in report.fallbacks if item.reason is Reason.GRAPH_BREAK]
    return {"stock": stock, "early": given, "effect": effect, "breaks": breaks}


def in_a_trainer(rank, folder):
    """FusedAdam under ZeRO-2, built and settled by ORTTrainer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "bf16": {"enabled": True},
    }
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=2,
        )
    )
    generator = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 32, (5,), generator=generator), "labels": row % 2} for row in range(32)]
    args = ORTTrainingArguments(
        folder, deepspeed=config, bf16=True, use_cpu=True, max_steps=3, logging_steps=1, save_strategy="no",
        disable_tqdm=True, report_to="none", optim="adamw_ort_fused",
    )  # fmt: skip
    trainer = ORTTrainer(model, args, train_dataset=samples, ort_config={"engine": {"enabled": False}})
    trainer.train()
    zero = trainer.optimizer.optimizer
    return {
        "made by": type(zero).__name__,
        "inside": type(zero.optimizer).__name__,
        "replaced": [name for name in CHECKS if getattr(getattr(zero, name), "_from_ort_accel", False)],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def main(rank, folder):
    torch.set_num_threads(1)
    # DeepSpeed asks whether a CPU is fast in fp16; that it can run it is enough here.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    Accelerator(cpu=True)
    seen = {f"{stage} {kind}": compare(stage, kind, rank) for stage in (1, 2) for kind in ("fp16", "bf16")}
    seen["early"] = early_gradients(rank)
    seen["refusals"] = refusals(rank)
    seen["trainer"] = in_a_trainer(rank, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
