"""ORTTrainer and ORTAccelCallback: which configuration counts, when it is refused, and which model it reaches."""

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import (
    HfArgumentParser,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

import ort_accel
from ort_accel import ConfigError, OrtAccelError, engine
from ort_accel.hf import (
    ORTAccelCallback,
    ORTAccelPlugin,
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)
from tests.hf.tiny import reviewer
from tests.tiers import mostly_long

OFF = {"engine": {"enabled": False}}


@pytest.fixture
def accelerated(monkeypatch):
    """The list of models that were to be accelerated, with their configurations."""
    calls, accelerate = [], ort_accel.accelerate

    def recorded(model, config):
        calls.append((model, config))
        return accelerate(model, config)

    monkeypatch.setitem(vars(ort_accel), "accelerate", recorded)
    return calls


def arguments(tmp_path, kind=ORTTrainingArguments, **more):
    return kind(
        output_dir=str(tmp_path / "out"), use_cpu=True, max_steps=3, save_strategy="no", disable_tqdm=True, **more
    )


def yaml(tmp_path, text, name="config.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def samples():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 32, (12, 7), generator=generator)
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]


def losses(trainer_type, tmp_path, **more):
    set_seed(3)
    args = arguments(tmp_path, logging_steps=1, per_device_train_batch_size=4)
    trainer = trainer_type(reviewer(), args, train_dataset=samples(), **more)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_scripts_get_the_argument(tmp_path):
    (args,) = HfArgumentParser(ORTTrainingArguments).parse_args_into_dataclasses(
        ["--ort_config", "x.yaml", "--output_dir", str(tmp_path), "--use_cpu"]
    )
    assert args.ort_config == "x.yaml"
    assert isinstance(args, TrainingArguments)


def test_the_configuration_of_the_arguments_reaches_the_model(accelerated, tmp_path):
    file = yaml(tmp_path, "compute: {attention: products}\n")
    trainer = ORTTrainer(reviewer(), arguments(tmp_path, ort_config=file))
    assert accelerated == [(trainer.model, ort_accel.load_config({"compute": {"attention": "products"}}))]


@pytest.mark.parametrize("as_what", [dict, ort_accel.load_config])
def test_the_configuration_of_the_call_reaches_the_model(accelerated, tmp_path, as_what):
    trainer = ORTTrainer(reviewer(), arguments(tmp_path), ort_config=as_what({"compute": {"attention": "products"}}))
    assert accelerated == [(trainer.model, ort_accel.load_config({"compute": {"attention": "products"}}))]


def test_plain_training_arguments_give_the_defaults(accelerated, tmp_path):
    trainer = ORTTrainer(reviewer(), arguments(tmp_path, TrainingArguments))
    assert accelerated == [(trainer.model, ort_accel.load_config(None))]


def test_two_different_configurations_are_an_error(accelerated, tmp_path):
    args = arguments(tmp_path, ort_config=yaml(tmp_path, "compute: {attention: products}\n"))
    with pytest.raises(OrtAccelError, match="give only one of them"):
        ORTTrainer(reviewer(), args, ort_config={"compute": {"attention": "auto"}})
    assert not accelerated


def test_the_same_configuration_twice_is_not_an_error(accelerated, tmp_path):
    args = arguments(tmp_path, ort_config=yaml(tmp_path, "compute: {attention: products}\n"))
    ORTTrainer(reviewer(), args, ort_config={"compute": {"attention": "products"}})
    assert len(accelerated) == 1


def test_a_wrong_file_is_refused_before_anything_is_built(accelerated, tmp_path):
    built = []
    args = arguments(tmp_path, ort_config=yaml(tmp_path, "engine:\n  enable: true\n"))
    with pytest.raises(ConfigError, match=r"config.yaml:2:3: engine.enable: .*engine.enabled"):
        ORTTrainer(args=args, model_init=lambda: built.append(reviewer()))
    assert not built
    assert not accelerated


@pytest.mark.parametrize("take", [lambda file: ORTTrainer(ort_config=file), ORTAccelCallback, ORTAccelPlugin])
def test_a_file_that_is_not_there_is_named(accelerated, tmp_path, take):
    AcceleratorState._reset_state(reset_partial_state=True)
    yaml(tmp_path, "version: 1")
    with pytest.raises(ConfigError, match=r"confg.yaml: no such file; did you mean .*config.yaml\?"):
        take(str(tmp_path / "confg.yaml"))
    assert not accelerated


def test_features_that_are_not_available_are_refused(accelerated, tmp_path):
    config = {"compute": {"generated": {"enabled": True}}, "engine": {"deterministic": True}}
    with pytest.raises(ConfigError, match=r"compute.generated.enabled: times decide which kernels run"):
        ORTTrainer(reviewer(), arguments(tmp_path), ort_config=config)
    assert not accelerated


@pytest.mark.parametrize("source", ["callback", "trainer"])
def test_a_switched_off_engine_leaves_losses_equal_to_the_bit(accelerated, tmp_path, source):
    plain = losses(Trainer, tmp_path)
    ours = (
        losses(ORTTrainer, tmp_path, ort_config=OFF)
        if source == "trainer"
        else losses(Trainer, tmp_path, callbacks=[ORTAccelCallback(OFF)])
    )
    assert len(plain) == 3
    assert ours == plain
    assert not accelerated


@pytest.mark.parametrize("source", mostly_long(["callback", "trainer"], "trainer"))
def test_training_on_the_engine_gives_eagers_losses(tmp_path, source):
    plain = losses(Trainer, tmp_path)
    ours = (
        losses(ORTTrainer, tmp_path)
        if source == "trainer"
        else losses(Trainer, tmp_path, callbacks=[ORTAccelCallback()])
    )
    assert ours == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("source", mostly_long(["callback", "trainer"], "callback"))
def test_the_model_of_model_init_is_the_one_that_is_accelerated(tmp_path, source):
    args = arguments(tmp_path)
    made = []
    init = {"model_init": lambda: made.append(reviewer()) or made[-1], "train_dataset": samples()}
    trainer = (
        ORTTrainer(args=args, **init)
        if source == "trainer"
        else Trainer(args=args, callbacks=[ORTAccelCallback()], **init)
    )
    trainer.train()
    first, second = made
    assert engine.config_of(second) is not None
    assert engine.config_of(first) is None
    assert ort_accel.report(second).segments, "nothing ran on the engine"


def test_a_callback_with_the_trainers_own_configuration_does_its_work(accelerated, tmp_path):
    trainer = ORTTrainer(reviewer(), arguments(tmp_path), callbacks=[ORTAccelCallback()])
    assert len(accelerated) == 1
    assert sum(isinstance(callback, ORTAccelCallback) for callback in trainer.callback_handler.callbacks) == 1


def test_a_callback_with_another_configuration_is_an_error(accelerated, tmp_path):
    with pytest.raises(OrtAccelError, match="remove the callback"):
        ORTTrainer(reviewer(), arguments(tmp_path), callbacks=[ORTAccelCallback(OFF)])


def test_data_parallel_is_refused_with_its_reason(accelerated, tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(OrtAccelError, match=r"DataParallel.*torchrun --nproc_per_node 2"):
        ORTTrainer(reviewer(), args)
    assert not accelerated
    ORTTrainer(reviewer(), args, ort_config=OFF)


def test_a_trainer_on_mps_is_refused_with_advice(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(TrainingArguments, "device", torch.device("mps"))
    model = reviewer()
    with pytest.raises(OrtAccelError, match=r"no ONNX Runtime trains there; set use_cpu=True"):
        ORTAccelCallback().on_init_end(args, model=model)
    assert engine.config_of(model) is None


def test_sequence_to_sequence_models_are_reached_too(accelerated, tmp_path):
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    args = arguments(tmp_path, ORTSeq2SeqTrainingArguments, ort_config=yaml(tmp_path, "version: 1\n"))
    trainer = ORTSeq2SeqTrainer(model, args)
    assert accelerated == [(trainer.model, ort_accel.load_config(None))]
