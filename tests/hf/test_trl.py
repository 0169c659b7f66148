"""TRL's trainers with the callback: as in eager mode, in whole graphs, and without what nobody trains on."""

import random
import sys
from functools import partial
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

import ort_accel
from ort_accel.hf import ORTAccelCallback, fused_head
from ort_accel.hf.fused_head import _log_probs, write_out_heads
from ort_accel.reporting.report import State
from tests.hf.tiny import arguments, llama, losses
from tests.hf.words import tokenizer
from tests.tiers import mostly_long

trl = pytest.importorskip("trl")
kernels = pytest.importorskip("trl.kernels.chunked_logprob")


def sentence(least, most):
    return " ".join(f"w{random.randint(3, 31)}" for _ in range(random.randint(least, most)))


def rows(**columns):
    random.seed(0)
    return Dataset.from_list([{name: sentence(*lengths) for name, lengths in columns.items()} for _ in range(16)])


def reward(completions, **_):
    return [float(len(text) % 5) for text in completions]


def sft(args, **common):
    data = rows(prompt=(2, 5), completion=(2, 9))
    return trl.SFTTrainer(args=args(trl.SFTConfig), train_dataset=data, **common)


def dft(args, **common):
    return sft(partial(args, loss_type="dft"), **common)


def dpo(args, **common):
    data = rows(prompt=(2, 5), chosen=(2, 9), rejected=(2, 9)).shuffle(seed=0)
    return trl.DPOTrainer(args=args(trl.DPOConfig), train_dataset=data, **common)


def dpo_with_reference_first(args, **common):
    return dpo(partial(args, precompute_ref_log_probs=True), **common)


def kto(args, **common):
    data = rows(prompt=(2, 5), completion=(2, 9)).add_column("label", [True, False] * 8)
    return trl.KTOTrainer(args=args(trl.KTOConfig), train_dataset=data, **common)


def rewards(args, **common):
    data = rows(chosen=(2, 9), rejected=(2, 9))
    return trl.RewardTrainer(args=args(trl.RewardConfig), train_dataset=data, **common)


SAMPLED = {"num_generations": 2, "max_completion_length": 6}


def grpo(args, **common):
    data = rows(prompt=(2, 5))
    return trl.GRPOTrainer(args=args(trl.GRPOConfig, **SAMPLED), train_dataset=data, reward_funcs=reward, **common)


def rloo(args, **common):  # compares with a reference model, too
    data = rows(prompt=(2, 5))
    return trl.RLOOTrainer(args=args(trl.RLOOConfig, **SAMPLED), train_dataset=data, reward_funcs=reward, **common)


def wide_llama():
    """A model whose products are large enough to matter."""
    return llama(hidden_size=128, intermediate_size=256, vocab_size=2000)


def packed(args, **common):
    return sft(partial(args, packing=True, max_length=32), **common)


def padding_free(args, **common):
    return sft(partial(args, padding_free=True, max_length=None), **common)


ALL = [sft, dft, dpo, dpo_with_reference_first, kto, rewards, grpo, rloo]
QUIET = {"engine": {"fallback": "report"}, "observe": {"log_level": "error"}}


@pytest.fixture
def trained(tmp_path):
    """Trains a model from the same weights, which a reference is loaded from, too."""
    set_seed(0)
    wide_llama().save_pretrained(tmp_path / "model")

    def train(build, *callbacks, quantized=None, checkpoints=False, **common):
        set_seed(0)
        kind = {rewards: partial(LlamaForSequenceClassification.from_pretrained, num_labels=1)}
        options = {} if quantized is None else {"quantization_config": quantized, "device_map": {"": "cpu"}}
        model = kind.get(build, LlamaForCausalLM.from_pretrained)(tmp_path / "model", **options)
        for module in model.modules():  # an evaluated layer of 4 bits has no gradient any more on some CPUs
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

        def args(kind, **more):
            return arguments(tmp_path, kind, bf16=False, gradient_checkpointing=checkpoints, **more)

        trainer = build(args, model=model, processing_class=tokenizer(), callbacks=list(callbacks), **common)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:  # TRL makes adapters of quantized models bfloat16, whatever the model's type
                parameter.data = parameter.data.float()
        trainer.train()
        return trainer

    return train


def is_captured_whole_without_padding(model):
    report = ort_accel.report(model)
    assert not [item for item in report.fallbacks if item.op == "a graph break"]
    assert report.features["density.padding"].state is State.APPLIED
    return report.counters["batches run on some rows"] > 0


@pytest.mark.parametrize("build", mostly_long(ALL, grpo))
def test_it_trains_as_in_eager_mode_in_whole_graphs(build, trained):
    eager, ours = trained(build), trained(build, ORTAccelCallback(QUIET))
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-4)
    assert is_captured_whole_without_padding(ours.model)
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    if getattr(ours, "ref_model", None) is not None:
        assert is_captured_whole_without_padding(ours.ref_model)
        assert any("only evaluated beside" in note for note in ort_accel.report(ours.model).notes)


@pytest.mark.parametrize("build", mostly_long([packed, padding_free]))
def test_packed_sequences_train_as_in_eager_mode_each_by_itself(build, trained):
    eager, ours = trained(build), trained(build, ORTAccelCallback(QUIET))
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-4)
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    assert ort_accel.report(ours.model).counters["packed sequences"] > 8


QUANTIZED = {
    "LoRA": None,
    "4 bits": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "8 bits": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    ("build", "weights"),
    mostly_long(
        [*product([*ALL, packed, padding_free], QUANTIZED)], (sft, "LoRA"), (dpo, "4 bits"), (packed, "4 bits")
    ),
)
def test_adapters_train_as_in_eager_mode(build, weights, trained):
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["score"] if build is rewards else None)
    # Checkpoints are TRL's default. Layers of 8 bits change within them, which Dynamo refuses.
    checkpoints = weights != "8 bits"
    train = partial(trained, build, quantized=QUANTIZED[weights], checkpoints=checkpoints, peft_config=config)
    eager, ours = train(), train(ORTAccelCallback(QUIET))
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-4)
    for name, mine in ours.model.named_parameters():
        if mine.requires_grad:
            torch.testing.assert_close(mine, eager.model.get_parameter(name), rtol=1e-3, atol=1e-4)
    report = ort_accel.report(ours.model)
    if QUANTIZED[weights] is not None:
        operators = {name for segment in report.segments for name in segment.ops}
        assert f"ort_accel.linear_{weights[0]}bit.default" in operators
    assert report.counters["compilations"] <= 6, "later steps compile as well"
    if build not in (packed, padding_free):
        assert is_captured_whole_without_padding(ours.model)


OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def scored(function, dtype, outputs, softcap=None, scale=1.0, seed=0):
    """The results of a head, and its gradients, from all results that have any."""
    torch.manual_seed(seed)
    given = [torch.randn(7, 8), torch.randn(30, 8), torch.randn(30)]
    targets = torch.randint(0, 30, (7,))
    leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
    results = function(*leaves, targets, 0.7, 12, softcap, scale, outputs)
    sum((item * torch.arange(1.0, 8)).sum() for item in results if item is not None and item.requires_grad).backward()
    return results, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("most_kept", [fused_head.MOST_KEPT_LOGITS, 0], ids=["kept", "computed again"])
@pytest.mark.parametrize("more", [{}, {"softcap": 3.0, "scale": 0.5}], ids=["plain", "capped and scaled"])
@pytest.mark.parametrize("outputs", [OUTPUTS, ()], ids=["all", "least"])
def test_the_head_as_operators_gives_what_trls_function_gives(more, outputs, most_kept, monkeypatch):
    monkeypatch.setattr(fused_head, "MOST_KEPT_LOGITS", most_kept)
    functions = kernels.ChunkedLogProbFunction.apply, _log_probs
    (theirs, expected), (ours, gradients) = (scored(each, torch.float32, outputs, **more) for each in functions)
    for one, other in zip(theirs, ours, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
            assert other.requires_grad == one.requires_grad
    for one, other in zip(expected, gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_the_head_is_as_near_to_single_precision_as_trls():
    errors = torch.zeros(2, 5)
    for seed in range(40):
        (true, expected), *found = (
            scored(function, dtype, OUTPUTS, seed=seed)
            for function, dtype in (
                (kernels.ChunkedLogProbFunction.apply, torch.float32),
                (kernels.ChunkedLogProbFunction.apply, torch.bfloat16),
                (_log_probs, torch.bfloat16),
            )
        )
        for row, (results, gradients) in zip(errors, found, strict=True):
            pairs = zip([*results[:2], *gradients], [*true[:2], *expected], strict=True)
            row += torch.stack([(item.detach().float() - exact.detach()).square().sum() for item, exact in pairs])
    theirs, ours = errors
    assert (ours <= 1.2 * theirs).all(), (ours, theirs)


@pytest.mark.parametrize("build", mostly_long([sft, dpo], sft))
def test_many_logits_never_exist_at_once(build, trained, monkeypatch):
    monkeypatch.setattr(fused_head, "MOST_KEPT_LOGITS", 0)
    eager, ours = trained(build), trained(build, ORTAccelCallback(QUIET))
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-4)
    assert is_captured_whole_without_padding(ours.model)
    assert any("linear_token_scores" in name for item in ort_accel.report(ours.model).segments for name in item.ops)


def test_trl_is_not_imported_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "trl.kernels.chunked_logprob")
    write_out_heads()
    assert "trl.kernels.chunked_logprob" not in sys.modules
