"""The optimizer that a Trainer ends up with: by its arguments, by YAML, with fp32 weights, resumed."""

import pytest
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.config import load_config
from ort_accel.hf import ORTAccelCallback, ORTSeq2SeqTrainingArguments, ORTTrainer, ORTTrainingArguments
from ort_accel.optim import AdamWMode, FusedAdam, MasterWeightOptimizer, build_optimizer
from ort_accel.reporting.report import State
from tests.tiers import mostly_long

OFF = {"engine": {"enabled": False}}
NAMED = {**OFF, "optimizer": {"name": "adamw_ort_fused"}}
FP16 = {**OFF, "optimizer": {"fp16": {"enabled": True, "initial_scale": 2.0**40, "window": 2}}}


def tiny_llama(dtype=torch.float32):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).to(dtype)


def data():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 32, (6,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, kind=ORTTrainingArguments, **more):
    settings = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1, "report_to": "none", "weight_decay": 0.1}
    return kind(
        output_dir=str(folder), use_cpu=True, disable_tqdm=True, seed=3, learning_rate=1e-2, **{**settings, **more}
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def inner(trainer):
    optimizer = trainer.optimizer
    while not isinstance(optimizer, FusedAdam):
        optimizer = optimizer.optimizer
    return optimizer


@pytest.mark.parametrize("way", mostly_long(["argument", "yaml"], "argument"))
def test_fused_adam_is_built_and_trains_as_pytorchs_adamw(tmp_path, way):
    more = {"optim": "adamw_ort_fused"} if way == "argument" else {}
    trainer = ORTTrainer(
        tiny_llama(), arguments(tmp_path, **more), train_dataset=data(), ort_config=NAMED if way == "yaml" else OFF
    )
    trainer.train()
    plain = Trainer(tiny_llama(), arguments(tmp_path, TrainingArguments), train_dataset=data())
    plain.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    optimizer = inner(trainer)
    assert {group["adam_w_mode"] for group in optimizer.param_groups} == {AdamWMode.ADAMW_TORCH}
    decaying, spared = optimizer.param_groups
    assert (decaying["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(spared["params"]) == 3, "the three RMSNorms"


def test_the_mode_of_the_configuration_counts(tmp_path):
    config = {**OFF, "optimizer": {"name": "adamw_ort_fused", "mode": "adam_l2"}}
    trainer = ORTTrainer(tiny_llama(), arguments(tmp_path), train_dataset=data(), ort_config=config)
    trainer.train()
    assert inner(trainer).param_groups[0]["adam_w_mode"] == AdamWMode.ADAM_L2_REGULARIZATION


@pytest.mark.parametrize("kind", [ORTTrainingArguments, ORTSeq2SeqTrainingArguments])
def test_arguments_with_the_name_can_be_parsed_saved_and_made_again(tmp_path, kind):
    line = ["--output_dir", str(tmp_path), "--optim", "adamw_ort_fused"]
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(line)
    assert args.optim == "adamw_ort_fused"
    assert args.to_dict()["optim"] == "adamw_ort_fused"
    assert kind(output_dir=str(tmp_path), optim=args.to_dict()["optim"]).optim == args.optim
    with pytest.raises(ValueError, match="adamw_no_such"):
        kind(output_dir=str(tmp_path), optim="adamw_no_such")


@pytest.mark.parametrize("dtype", mostly_long([torch.bfloat16, torch.float32], torch.bfloat16))
def test_fp32_weights_and_a_loss_scale_in_a_trainer(tmp_path, dtype):
    """Scales of 2**40 overflow at nothing in bf16 and fp32: losses are those without a scale, to rounding."""
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5)
    trainer = ORTTrainer(tiny_llama(dtype), args, train_dataset=data(), ort_config=FP16)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MasterWeightOptimizer)
    assert optimizer.loss_scale.scale == 2.0**42
    plain = Trainer(
        tiny_llama(dtype),
        arguments(tmp_path, TrainingArguments, gradient_accumulation_steps=2, max_grad_norm=0.5),
        train_dataset=data(),
    )
    plain.train()
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    assert losses(trainer) == pytest.approx(losses(plain), rel=rounding)
    norms = [[entry["grad_norm"] for entry in t.state.log_history if "grad_norm" in entry] for t in (trainer, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=5 * rounding)


def test_training_in_fp16_skips_steps_counts_them_and_resumes_exactly(tmp_path):
    config = {**OFF, "optimizer": {"name": "adamw_ort_fused", "fp16": {"enabled": True, "initial_scale": 2.0**24}}}

    def trainer(folder, **more):
        args = arguments(folder, max_steps=8, save_strategy="steps", save_steps=4, **more)
        return ORTTrainer(tiny_llama(torch.float16), args, train_dataset=data(), ort_config=config)

    whole = trainer(tmp_path / "run")
    whole.train()
    optimizer = whole.optimizer.optimizer
    assert 0 < optimizer.skipped_steps < 8
    assert optimizer.loss_scale.scale == 2.0 ** (24 - optimizer.skipped_steps)
    resumed = trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.optimizer.optimizer.skipped_steps == optimizer.skipped_steps
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_report_tells_of_the_optimizer(tmp_path):
    config = {"optimizer": {"name": "adamw_ort_fused", "fp16": {"enabled": True}}}
    trainer = ORTTrainer(tiny_llama(), arguments(tmp_path, max_steps=1), train_dataset=data(), ort_config=config)
    assert ort_accel.report(trainer.model).features["optimizer.name"].reason == "ORTTrainer builds adamw_ort_fused"
    trainer.train()
    features = ort_accel.report(trainer.model).features
    assert features["optimizer.name"].effect == "FusedAdam, adamw_torch; 3 parameters without decay"
    assert features["optimizer.fp16.enabled"].effect == "fp32 weights, loss scale 65536"
    assert features["optimizer.fp16.replace_checks"].state == "off"


def test_a_trainer_that_cannot_build_fused_adam_is_an_error(tmp_path):
    for config, message in ((NAMED, "optimizer.name is adamw_ort_fused, and"), (FP16, "fp16.enabled is true, and")):
        trainer = Trainer(
            tiny_llama(),
            arguments(tmp_path, TrainingArguments),
            train_dataset=data(),
            callbacks=[ORTAccelCallback(config)],
        )
        with pytest.raises(OrtAccelError, match=message):
            trainer.train()


def test_a_plain_trainer_takes_the_optimizer_that_the_configuration_builds(tmp_path):
    model, config = tiny_llama(), load_config(NAMED)
    trainer = Trainer(
        model,
        arguments(tmp_path, TrainingArguments),
        train_dataset=data(),
        callbacks=[ORTAccelCallback(config)],
        optimizers=(build_optimizer(model, config.optimizer, lr=1e-2, weight_decay=0.1), None),
    )
    trainer.train()
    assert isinstance(inner(trainer), FusedAdam)


def test_contradicting_optimizer_settings_are_errors(tmp_path):
    other = ORTTrainer(
        tiny_llama(),
        arguments(tmp_path),
        train_dataset=data(),
        ort_config=NAMED,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
    )
    with pytest.raises(OrtAccelError, match="given SGD in optimizer_cls_and_kwargs, and adamw_ort_fused"):
        other.train()
    config = {**OFF, "optimizer": {"fp16": {"replace_checks": True}}}
    with pytest.raises(OrtAccelError, match="replace_checks is true, and it cannot be: no DeepSpeed"):
        ORTTrainer(tiny_llama(), arguments(tmp_path), train_dataset=data(), ort_config=config).train()


IN_BACKWARD = {
    "memory": {"early_gradient_release": True},
    "optimizer": {"name": "adamw_ort_fused", "step_in_backward": True},
}


def test_updates_within_the_backward_are_the_trainers(tmp_path):
    after = ORTTrainer(tiny_llama(), arguments(tmp_path, max_grad_norm=0), train_dataset=data(), ort_config=NAMED)
    within = ORTTrainer(
        tiny_llama(), arguments(tmp_path, max_grad_norm=0), train_dataset=data(), ort_config=IN_BACKWARD
    )
    for trainer in (after, within):
        trainer.train()
    assert losses(within) == pytest.approx(losses(after), rel=1e-5)
    report = ort_accel.report(within.model)
    count = len(list(within.model.parameters()))
    assert report.features["memory.early_gradient_release"].effect.startswith(f"{count} parameters get their gradients")
    assert report.features["optimizer.step_in_backward"].state is State.APPLIED
    assert not any(parameter._post_accumulate_grad_hooks for parameter in within.model.parameters())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "max_grad_norm=1 clips by the norm of all gradients: set max_grad_norm=0"),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0}, "gradients are accumulated over 2 batches"),
    ],
)
def test_step_in_backward_refuses_arguments_that_need_all_gradients(tmp_path, more, why):
    trainer = ORTTrainer(tiny_llama(), arguments(tmp_path, **more), train_dataset=data(), ort_config=IN_BACKWARD)
    with pytest.raises(OrtAccelError, match=f"optimizer.step_in_backward is true, and {why}"):
        trainer.train()
