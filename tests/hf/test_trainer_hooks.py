"""What the hooks rest on in transformers' Trainer: one line says which assumption broke."""

import inspect

from transformers import Trainer

from ort_accel.hf import ORTAccelCallback


def source(name):
    ORTAccelCallback()
    return inspect.getsource(inspect.unwrap(getattr(Trainer, name)))


def parameters(name):
    ORTAccelCallback()
    return list(inspect.signature(getattr(Trainer, name)).parameters)


def test_the_methods_take_what_they_took():
    assert parameters("_save_checkpoint") == ["self", "model", "trial"]
    assert parameters("log") == ["self", "logs", "start_time"]
    assert parameters("compute_loss") == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
    assert parameters("training_step") == ["self", "model", "inputs", "num_items_in_batch"]


def test_a_trainer_makes_its_accelerator_in_the_hooked_method():
    assert parameters("create_accelerator_and_postprocess") == ["self"]
    assert "self.accelerator = Accelerator(" in source("create_accelerator_and_postprocess")


def test_a_checkpoint_goes_where_get_output_dir_says():
    assert "run_dir = self._get_output_dir(trial=trial)" in source("_save_checkpoint")


def test_uploads_and_rotation_call_the_deferred_methods():
    text = source("_save_checkpoint")
    assert "self._push_from_checkpoint(output_dir)" in text
    assert "output_dir=run_dir,\n                save_total_limit=" in text


def test_loggers_get_a_line_after_the_trainers_state_has_its_copy():
    text = source("log")
    assert "output = {**logs" in text
    assert text.index("log_history.append(output)") < text.index("callback_handler.on_log(self.args")


def test_a_second_callback_extends_nothing_again():
    ORTAccelCallback()
    before = Trainer.log
    ORTAccelCallback()
    assert Trainer.log is before
    assert not hasattr(Trainer.log.__wrapped__, "__wrapped__")
