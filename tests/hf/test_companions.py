"""Models that a Trainer has prepared for evaluation: on ONNX Runtime where the Trainer has the callback, else not."""

import copy
import re

import pytest
import torch
from transformers import Trainer

import ort_accel
from ort_accel.engine import config_of
from ort_accel.hf import ORTAccelCallback
from tests.hf.tiny import arguments, llama, texts

QUIET = {"observe": {"log_level": "error"}}


def trainer(folder, *callbacks):
    ORTAccelCallback(QUIET)  # the hooks are there, whoever has them
    return Trainer(llama(), arguments(folder), train_dataset=texts(), callbacks=list(callbacks))


def prepared(trainer, model):
    assert trainer.accelerator.prepare_model(model, evaluation_mode=True) is model
    return model


@torch.no_grad()
def test_a_companion_gives_what_it_gave_also_with_other_weights(tmp_path):
    main, model = trainer(tmp_path, ORTAccelCallback(QUIET)), llama().eval()
    plain, ids = copy.deepcopy(model), torch.randint(3, 32, (2, 7))
    prepared(main, model)
    for _ in range(2):
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.data.mul_(0.9)  # behind autograd's back, as TRL brings a reference up to date
    assert any(segment.graph.startswith("inference") for segment in ort_accel.report(model).segments)
    assert "a LlamaForCausalLM that is only evaluated beside this model runs there, too" in (
        ort_accel.report(main.model).notes
    )


def test_a_companion_has_no_report_file_and_no_inspector(tmp_path):
    config = {**QUIET, "observe": {**QUIET["observe"], "report_file": str(tmp_path / "report.html")}}
    main = trainer(tmp_path, ORTAccelCallback({**config, "density": {"inspect": True}}))
    found = config_of(prepared(main, llama()))
    assert found.observe.report_file is None
    assert not found.density.inspect
    assert config_of(main.model).observe.report_file is not None


def test_models_that_are_saved_have_names_of_their_own(tmp_path):
    config = {**QUIET, "engine": {"save_onnx": str(tmp_path / "onnx"), "onnx_prefix": "mine"}}
    main = trainer(tmp_path, ORTAccelCallback(config))
    for model in (main.model, prepared(main, llama())):
        with torch.no_grad():
            model(input_ids=torch.randint(3, 32, (2, 7)))
    names = {re.split("_inference", file.name)[0] for file in (tmp_path / "onnx").glob("*.onnx")}
    assert names == {"mine", "mine_companion_0"}


def test_the_trained_model_stays_restored(tmp_path):
    main = trainer(tmp_path, ORTAccelCallback(QUIET))
    ort_accel.restore(main.model)
    assert config_of(prepared(main, main.model)) is None


@pytest.mark.parametrize("callbacks", [[], [{"engine": {"enabled": False}}]], ids=["no callback", "switched off"])
def test_companions_of_trainers_without_the_callback_stay_plain(callbacks, tmp_path):
    main = trainer(tmp_path, *map(ORTAccelCallback, callbacks))
    assert config_of(prepared(main, llama())) is None


def test_a_companion_on_another_compiler_stays_there(tmp_path):
    main, model, wrapped = trainer(tmp_path, ORTAccelCallback(QUIET)), llama(), torch.compile(llama(), backend="eager")
    model.compile(backend="eager")
    assert config_of(prepared(main, model)) is None
    assert prepared(main, wrapped) is wrapped


def test_other_models_that_are_prepared_for_training_stay_plain(tmp_path):
    main, model = trainer(tmp_path, ORTAccelCallback(QUIET)), llama()
    main.accelerator.prepare_model(model)
    assert config_of(model) is None
