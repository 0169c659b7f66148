"""A Llama with bitsandbytes' 4-bit or 8-bit weights and LoRA trains as in eager mode, in one session a direction."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.native.library import native_library
from ort_accel.reporting.fallbacks import Reason
from ort_accel.reporting.report import State
from ort_accel.reporting.segments import Runner
from tests.tiers import mostly_long

pytest.importorskip("bitsandbytes")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB, LENGTH = 50, 24


EIGHT_BIT = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=1.5)


def four_bit(kind: str = "nf4", nested: bool = True) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )


def qlora(folder, quantized: BitsAndBytesConfig) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantized, device_map={"": "cpu"})
    return get_peft_model(model, LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM")).train()


def batch(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(number)
    ids = torch.randint(0, VOCAB, (4, LENGTH))
    mask = (torch.arange(LENGTH) < torch.tensor([6, 9, 14, 18])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def losses_of(model: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=1e-2)
    losses = []
    for number in range(steps):
        loss = model(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def operators(model: nn.Module) -> set[str]:
    return {name for segment in ort_accel.report(model).segments for name in segment.ops}


def assert_as_eager(eager: nn.Module, ours: nn.Module) -> None:
    torch.testing.assert_close(losses_of(ours), losses_of(eager), rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad, name
        if mine.requires_grad:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}")


def assert_whole_and_without_padding(model: nn.Module, graphs: int) -> None:
    """Checks that sessions run each graph, on the rows that count alone."""
    report = ort_accel.report(model)
    assert not [name for name in operators(model) if "bitsandbytes" in name]
    assert not [item for item in report.fallbacks if item.reason is Reason.UNSUPPORTED_OP]
    assert not [name for name, feature in report.features.items() if feature.state is State.REFUSED]
    assert report.features["density.padding"].state is State.APPLIED
    assert report.counters["batches run on some rows"]
    if native_library() is not None:
        assert [item.runner for item in report.segments] == [Runner.ORT, Runner.ORT] * graphs


@pytest.mark.parametrize(("kind", "nested"), mostly_long([("nf4", True), ("fp4", False)], ("nf4", True)))
def test_it_trains_as_in_eager_mode_in_one_session_a_direction(tmp_path, kind, nested):
    eager, ours = qlora(tmp_path, four_bit(kind, nested)), ort_accel.accelerate(qlora(tmp_path, four_bit(kind, nested)))
    assert_as_eager(eager, ours)
    assert {"ort_accel.linear_4bit.default", "ort_accel.linear_4bit_backward.default"} <= operators(ours)
    assert_whole_and_without_padding(ours, graphs=1)


def test_checkpointed_layers_have_the_same_kernels(tmp_path):
    """PEFT's `prepare_model_for_kbit_training` switches checkpointing on."""
    eager, ours = qlora(tmp_path, four_bit()), ort_accel.accelerate(qlora(tmp_path, four_bit()))
    for model in (eager, ours):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    assert_as_eager(eager, ours)
    assert {"ort_accel.linear_4bit.default", "ort_accel.linear_4bit_backward.default"} <= operators(ours)
    assert ort_accel.report(ours).counters["fused rotary embeddings"] == 4
    assert_whole_and_without_padding(ours, graphs=1)


@pytest.mark.parametrize(
    "config",
    mostly_long(
        [{"memory": {"level": 1}}, {"compute": {"native": False}}, {"density": {"padding": False, "labels": False}}],
        {"compute": {"native": False}},
    ),
    ids=["memory level 1", "without the native library", "dense"],
)
def test_it_trains_as_in_eager_mode_with_other_options(tmp_path, config):
    eager, ours = qlora(tmp_path, four_bit()), ort_accel.accelerate(qlora(tmp_path, four_bit()), config)
    assert_as_eager(eager, ours)
    assert "ort_accel.linear_4bit.default" in operators(ours)


@pytest.mark.parametrize(
    "config", mostly_long([{}, {"compute": {"native": False}}], {}), ids=["native", "without the native library"]
)
def test_layers_of_8_bits_train_as_in_eager_mode(tmp_path, config):
    eager, ours = qlora(tmp_path, EIGHT_BIT), ort_accel.accelerate(qlora(tmp_path, EIGHT_BIT), config)
    assert_as_eager(eager, ours)
    assert {"ort_accel.linear_8bit.default", "ort_accel.linear_8bit_backward.default"} <= operators(ours)
    if not config:
        assert_whole_and_without_padding(ours, graphs=2)  # the layers prepare themselves in the first step


def test_layers_of_8_bits_quantize_their_input_in_evaluation(tmp_path):
    eager, ours = qlora(tmp_path, EIGHT_BIT).eval(), ort_accel.accelerate(qlora(tmp_path, EIGHT_BIT).eval())
    with torch.no_grad():
        found, expected = (model(**batch(1)) for model in (ours, eager))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-2, atol=1e-2)
    assert ort_accel.report(ours).counters["compilations"] == 1
    assert not torch.allclose(eager.train()(**batch(1)).logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_layers_of_8_bits_train_under_autocast_as_precisely_as_in_eager_mode(tmp_path):
    exact, eager, ours = (qlora(tmp_path, EIGHT_BIT) for _ in range(3))
    ort_accel.accelerate(ours)
    gradients_of(exact)
    with torch.autocast("cpu", torch.bfloat16):
        gradients_of(eager), gradients_of(ours)
    assert "ort_accel.linear_8bit.default" in operators(ours)
    models = exact.named_parameters(), ours.parameters(), eager.parameters()
    for (name, wanted), mine, theirs in zip(*models, strict=True):
        if wanted.requires_grad:
            errors = [(item.grad - wanted.grad).norm() for item in (mine, theirs)]
            assert errors[0] <= 2 * errors[1] + 1e-6, name


def gradients_of(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters begin with zeros, which leave others without gradients
            nn.init.normal_(parameter, std=0.1)
    model(**batch(0)).loss.backward()
