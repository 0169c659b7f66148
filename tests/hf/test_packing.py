"""`data.packing` in a Trainer, batches that others pack, and models in which packed sequences would meet."""

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BitsAndBytesConfig,
    BloomConfig,
    BloomForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    Trainer,
    set_seed,
)
from transformers.utils import is_flash_attn_2_available

import ort_accel
from ort_accel import OrtAccelError
from ort_accel.data import PackingCollator
from ort_accel.eager import comparison
from ort_accel.hf import ORTAccelCallback, ORTTrainer
from ort_accel.hf.metrics import StepMetrics
from ort_accel.hf.packing import why_not_packed
from ort_accel.reporting.report import State
from tests.hf.tiny import arguments, llama, losses, reviews
from tests.hf.words import tokenizer
from tests.tiers import mostly_long

LENGTHS = [7, 12, 3, 9, 5, 15, 4, 8, 11, 6, 2, 10]
PACKING = {"data": {"packing": {"max_length": 16}}}


def samples():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 32, (length,), generator=generator).tolist()} for length in LENGTHS]


def trained(tmp_path, kind=ORTTrainer, config=PACKING, data=None, model=None, **more):
    set_seed(0)
    model = llama() if model is None else model
    args = arguments(tmp_path, max_steps=3, per_device_train_batch_size=2)
    given = {"ort_config": config} if kind is ORTTrainer else {"callbacks": [ORTAccelCallback(config)]}
    trainer = kind(model, args, train_dataset=samples() if data is None else data, **given, **more)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A training that some tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "why_not", lambda *_: "switched off for tests")
        return trained(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("kind", mostly_long([ORTTrainer, Trainer], ORTTrainer))
def test_a_trainer_packs_its_training_set(tmp_path, packed, kind):
    trainer = packed if kind is ORTTrainer else trained(tmp_path, kind)
    report = ort_accel.report(trainer.model)
    assert report.features["data.packing"].state is State.APPLIED
    assert report.features["data.packing"].effect == "12 samples in 6 rows of 16, 95.8% full"
    assert report.counters["packed sequences"] == 12
    assert trainer.data_collator is not None
    assert trainer.train_dataset == samples()


@pytest.mark.parametrize("flatten", [False, True])
def test_packed_training_is_eager_mode_s(tmp_path, packed, flatten):
    config = {"data": {"packing": {"max_length": 16, "flatten": flatten}}}
    ours = trained(tmp_path, config=config) if flatten else packed
    eager = trained(tmp_path, config={**config, "engine": {"enabled": False}})
    assert losses(ours) == pytest.approx(losses(eager), rel=1e-4)
    for wanted, got in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_step_on_packed_rows_is_that_on_single_sequences(tmp_path):
    """One step on all samples; the Trainer divides by the tokens of the whole step."""
    steps = {
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
    }
    data = [{**one, "labels": [-100, *one["input_ids"][1:]]} for one in samples()]

    def after_a_step(rows, accumulated, **more):
        set_seed(0)
        args = arguments(tmp_path, **steps, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulated)
        trainer = ORTTrainer(llama(), args, train_dataset=data, **more)
        trainer.train()
        return trainer.model

    packed = after_a_step(6, 1, ort_config=PACKING)
    single = after_a_step(1, len(data), ort_config={"engine": {"enabled": False}}, data_collator=one_sequence)
    for wanted, got in zip(single.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def one_sequence(examples):
    (example,) = examples
    return {name: torch.tensor([values]) for name, values in example.items()}


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path):
    rows = [{**one, "attention_mask": [1] * len(one["input_ids"]), "title": "x"} for one in samples()]
    trainer = trained(tmp_path, Trainer, data=Dataset.from_list(rows))
    assert ort_accel.report(trainer.model).counters["packed sequences"] == 12


def test_evaluation_keeps_its_collator(tmp_path):
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = trained(tmp_path, data_collator=collator, eval_dataset=samples())
    assert trainer.data_collator is collator
    assert "eval_loss" in trainer.evaluate()


def roberta(**more):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, **more))


def bert():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return BertLMHeadModel(BertConfig(**sizes, is_decoder=False))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


@pytest.mark.parametrize("build", [roberta, bert, bloom])
def test_models_in_which_sequences_meet_are_refused(tmp_path, build):
    with pytest.raises(OrtAccelError, match=r"data.packing packs.* a sequence depends on the sequences before it"):
        trained(tmp_path, model=build())


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_models_that_keep_sequences_apart_are_found(impl):
    model = llama(attn_implementation=impl, attention_dropout=0.5, use_cache=False).train()
    assert why_not_packed(model) is None
    assert all(module.training for module in model.modules())


def test_a_cache_hides_the_positions():
    assert "depends on" in why_not_packed(llama(use_cache=True))


def test_a_check_leaves_4_bit_layers_in_the_form_that_has_a_gradient(tmp_path):
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantized, device_map={"": "cpu"})
    model.config.use_cache = False
    layer = model.model.layers[0].mlp.up_proj
    for module in model.modules():
        module.support_avx512bf16_for_cpu = True  # as on some CPUs
    assert why_not_packed(model) is None
    assert not layer.training
    assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def test_positions_that_begin_elsewhere_are_found():
    class Shifted(torch.nn.Module):
        """Numbers positions from 2 where it is given none."""

        def __init__(self):
            super().__init__()
            self.tokens, self.places = torch.nn.Embedding(64, 8), torch.nn.Embedding(64, 8)
            self.config = None

        def get_input_embeddings(self):
            return self.tokens

        def forward(self, input_ids, position_ids=None):
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1])[None] + 2
            return (self.tokens(input_ids) + self.places(position_ids),)

    assert why_not_packed(Shifted()) == "positions do not begin with 0"
    assert why_not_packed(Shifted(), first_position=2) is None


def test_a_flattening_collator_on_such_a_model_is_refused(tmp_path):
    with pytest.raises(
        OrtAccelError, match=r"the DataCollatorWithFlattening packs.*depends on the sequences before it"
    ):
        trained(tmp_path, config=None, model=roberta(), data_collator=DataCollatorWithFlattening(position_ids_start=2))


def test_a_flattening_collator_trains_as_in_eager_mode(tmp_path):
    ours = trained(tmp_path, config=None, data_collator=DataCollatorWithFlattening())
    eager = trained(tmp_path, config={"engine": {"enabled": False}}, data_collator=DataCollatorWithFlattening())
    assert losses(ours) == pytest.approx(losses(eager), rel=1e-4)
    assert ort_accel.report(ours.model).counters["packed sequences"] == 6


def test_another_collator_or_loader_is_refused(tmp_path):
    with pytest.raises(OrtAccelError, match="this Trainer has a function"):
        trained(tmp_path, data_collator=one_sequence)
    with pytest.raises(OrtAccelError, match="this Trainer has a DataCollatorWithFlattening"):
        trained(tmp_path, data_collator=DataCollatorWithFlattening())

    class Own(ORTTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, collate_fn=one_sequence)

    Own.__name__ = "ORTTrainer"
    set_seed(0)
    trainer = Own(llama(), arguments(tmp_path, max_steps=1), train_dataset=samples(), ort_config=PACKING)
    with pytest.raises(OrtAccelError, match="the training data loader has no packed rows"):
        trainer.train()


def test_sizes_of_packed_rows_are_open_from_the_first_graph(packed):
    assert ort_accel.report(packed.model).counters["compilations"] == 2  # forward and backward, for all lengths


def test_padding_at_the_end_of_packed_rows_is_no_token():
    metrics = StepMetrics()
    metrics.begin_step()
    metrics.count_tokens(PackingCollator(max_length=8)([{"input_ids": [5] * length} for length in (5, 2, 2, 3)]))
    metrics.end_step(1)
    found = metrics.take()
    assert found["ort/density"] == 12 / 16
    assert found["ort/tokens_per_s"] * found["ort/step_time"] == pytest.approx(12)


def test_flash_attention_that_is_not_installed_is_transformers_error():
    if is_flash_attn_2_available():
        pytest.skip("flash attention is installed")
    with pytest.raises(ImportError, match=r"flash_attn|FlashAttention2"):
        LlamaForCausalLM._from_config(llama().config, attn_implementation="flash_attention_2")


def test_classes_as_labels_are_refused(tmp_path):
    data = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"]} for row in reviews()]
    with pytest.raises(OrtAccelError, match="one label a token"):
        trained(tmp_path, data=data)
