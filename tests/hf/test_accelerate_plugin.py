"""ORTAccelPlugin: which configuration counts, which models it reaches, and that nothing else about them changes."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments, set_seed

import ort_accel
from ort_accel import ConfigError, OrtAccelError, engine
from ort_accel.hf import ORTAccelCallback, ORTAccelPlugin, ORTTrainer, accelerate_hooks
from ort_accel.hf.accelerate_plugin import accelerate_all_models
from ort_accel.hf.activation import CONFIG_VARIABLE
from tests.hf.tiny import reviewer
from tests.tiers import mostly_long

PRODUCTS = {"compute": {"attention": "products"}}


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    """accelerate shares its state among all Accelerators of a process, and the launch marks the process."""
    monkeypatch.setattr(ORTAccelPlugin, "launch_config", None)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def launched(monkeypatch):
    """Puts the process into the state of a script that `ort_accel.run` runs."""

    def launch(config=None):
        monkeypatch.setenv(CONFIG_VARIABLE, "")
        accelerate_all_models(config)

    return launch


def yaml(tmp_path, text, name="config.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))


def train(accelerator, steps=3):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_one_argument_puts_prepared_models_on_onnx_runtime():
    _, eager = train(Accelerator(cpu=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    model, losses = train(Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin()))
    assert losses == pytest.approx(eager, abs=1e-6)
    assert ort_accel.report(model).counters["compilations"] == 2


def test_an_accelerator_without_the_plugin_is_left_alone():
    ORTAccelPlugin()
    model, _ = train(Accelerator(cpu=True))
    assert engine.config_of(model) is None


def test_the_model_is_not_wrapped_and_its_checkpoints_are_eagers(tmp_path):
    accelerator = Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin())
    model, _ = train(accelerator)
    assert type(model) is nn.Sequential
    assert accelerator.unwrap_model(model) is model
    assert list(accelerator.get_state_dict(model)) == list(net().state_dict())
    accelerator.save_state(str(tmp_path / "state"))
    trained = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())
    plain = net()
    accelerator.save_model(model, str(tmp_path / "model"))
    from safetensors.torch import load_file

    plain.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert torch.equal(plain[0].weight, model[0].weight)


def test_the_call_overrides_the_file_and_the_file_the_environment(tmp_path, monkeypatch):
    assert ORTAccelPlugin().config == ort_accel.load_config()
    monkeypatch.setenv(CONFIG_VARIABLE, yaml(tmp_path, "engine: {threads: 3, fallback: report}", "environment.yaml"))
    assert ORTAccelPlugin().config.engine.threads == 3
    file = yaml(tmp_path, "engine: {threads: 2}")
    assert ORTAccelPlugin(file).config == ort_accel.load_config({"engine": {"threads": 2}})
    both = ORTAccelPlugin(file, engine={"fallback": "error"}).config
    assert both == ort_accel.load_config({"engine": {"threads": 2, "fallback": "error"}})


def test_a_wrong_value_is_an_error_before_there_is_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml:1:10: engine.enable"):
        ORTAccelPlugin(yaml(tmp_path, "engine: {enable: true}"))
    with pytest.raises(ConfigError, match=r"engine.fallbak: unknown key; did you mean engine.fallback"):
        ORTAccelPlugin(engine={"fallbak": "error"})


def test_a_plugin_after_the_first_accelerator_is_an_error():
    Accelerator(cpu=True)
    with pytest.raises(OrtAccelError, match="from the first Accelerator of a process only"):
        ORTAccelPlugin()


def test_accelerate_itself_compiles_nothing(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    assert Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin()).state.dynamo_plugin.backend is DynamoBackend.NO


def test_a_switched_off_engine_leaves_the_model_alone():
    model, _ = train(Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin(engine={"enabled": False})))
    assert engine.config_of(model) is None


def test_under_a_launch_every_accelerator_is_reached(launched, tmp_path):
    launched(yaml(tmp_path, "compute: {attention: products}"))
    model, _ = train(Accelerator(cpu=True))
    assert engine.config_of(model) == ort_accel.load_config(PRODUCTS)
    assert ORTAccelPlugin.launch_config == ort_accel.load_config(PRODUCTS)


def test_a_launched_accelerator_can_be_pickled_with_what_it_prepared(launched):
    launched()
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(net(), DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=2))
    model(torch.randn(2, 4)).sum().backward()
    loaded = pickle.loads(pickle.dumps(accelerator))
    assert len(loaded._dataloaders[0]) == len(loader)
    assert engine.config_of(model) is not None


def test_a_plugin_in_a_launched_script_goes_before_the_launch(launched):
    launched()
    model, _ = train(Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin(PRODUCTS)))
    assert engine.config_of(model) == ort_accel.load_config(PRODUCTS)


def trainer_of(kind, tmp_path, steps=2, **more):
    set_seed(4)
    ids = torch.randint(1, 32, (32, 7))
    data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    args = TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        max_steps=steps,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
        report_to=[],
    )
    return kind(model=reviewer(), args=args, train_dataset=data, **more)


def trained(kind, tmp_path, **more):
    trainer = trainer_of(kind, tmp_path, **more)
    trainer.train()
    return trainer.model


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", mostly_long([Trainer, ORTTrainer], ORTTrainer))
def test_a_launched_trainer_is_accelerated_once_with_the_configuration_of_the_launch(launched, tmp_path, kind):
    launched(yaml(tmp_path, "compute: {attention: products}"))
    model = trained(kind, tmp_path)
    assert engine.config_of(model) == ort_accel.load_config(PRODUCTS)
    assert ort_accel.report(model).counters["compilations"] == 2


def test_a_callbacks_configuration_overrides_that_of_a_launch(launched, tmp_path):
    launched()
    model = trained(Trainer, tmp_path, callbacks=[ORTAccelCallback(PRODUCTS)])
    assert engine.config_of(model) == ort_accel.load_config(PRODUCTS)
    assert ort_accel.report(model).counters["compilations"] == 2
    assert any("that of the launch is not used" in note for note in ort_accel.report(model).notes)


@pytest.mark.parametrize("writer", mostly_long(["eager", "launched"], "launched"))
def test_a_checkpoint_of_either_side_resumes_on_the_other(launched, tmp_path, monkeypatch, writer):
    whole = trainer_of(Trainer, tmp_path / "whole", steps=4)
    whole.train()
    if writer == "launched":
        launched()
    first = trainer_of(Trainer, tmp_path)
    first.train()
    if writer == "launched":
        monkeypatch.setattr(ORTAccelPlugin, "launch_config", None)
    else:
        launched()
    second = trainer_of(Trainer, tmp_path, steps=4)
    second.train(resume_from_checkpoint=True)
    assert (engine.config_of(first.model) is None) == (writer == "eager")
    assert (engine.config_of(second.model) is None) == (writer == "launched")
    assert losses_of(second) == pytest.approx(losses_of(whole), abs=1e-5)
    assert len(losses_of(second)) == 4


def test_mps_is_refused_with_advice(monkeypatch):
    accelerator = Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin())
    accelerator.state.device = torch.device("mps")
    with pytest.raises(OrtAccelError, match=r"no ONNX Runtime trains there.*ort-accel launch --cpu"):
        accelerator.prepare(net())


def test_a_model_that_the_script_compiles_is_refused():
    accelerator = Accelerator(cpu=True, dynamo_plugin=ORTAccelPlugin())
    with pytest.raises(OrtAccelError, match=r"wrapped by torch.compile"):
        accelerator.prepare(torch.compile(net()))


class Sharding:
    """Stands in for an Accelerator on machines with GPUs."""

    device = torch.device("cpu")

    def __init__(self, kind):
        self.distributed_type = kind


@pytest.mark.parametrize(
    ("kind", "word"), [(DistributedType.FSDP, "sharded"), (DistributedType.MEGATRON_LM, "another")]
)
def test_a_model_that_cannot_be_captured_whole_is_declined_with_the_reason(kind, word):
    model, config = net(), ort_accel.load_config()
    prepared = accelerate_hooks._prepare_together(Sharding(kind), config, lambda *objects: objects, model)
    assert prepared == (model,)
    assert engine.config_of(model) is None
    assert word in ort_accel.report(model).features["engine"].reason
    with pytest.raises(OrtAccelError, match=r"engine.fallback is error, and this Sequential cannot be accelerated"):
        engine.decline(model, ort_accel.load_config({"engine": {"fallback": "error"}}), "it is sharded")


@pytest.mark.parametrize("name", ["prepare_model", "_prepare_deepspeed", "_prepare_fsdp2", "_prepare_megatron_lm"])
def test_accelerate_still_has_what_is_hooked(name):
    ORTAccelPlugin()
    assert getattr(Accelerator, name).__wrapped__.__module__ == "accelerate.accelerator"


def test_deepspeeds_engine_still_has_the_hooks_that_are_moved():
    pytest.importorskip("deepspeed")
    from deepspeed import DeepSpeedEngine

    for name in ("_forward_prologue", "_forward_epilogue", "_create_module_forward_pre_hook"):
        assert hasattr(DeepSpeedEngine, name)
