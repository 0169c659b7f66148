"""What people do with a Trainer, on the engine and in eager: the same numbers from the same seed."""

import copy
from itertools import product

import numpy
import pytest
import torch
from torch.nn import functional
from transformers import set_seed

import ort_accel
from ort_accel.hf import ORTAccelCallback, ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments
from tests.hf.tiny import arguments, bert, llama, losses, make, reviews, t5, texts, train
from tests.tiers import mostly_long

OURS = ("ORTTrainer", "callback")


def own_loss(outputs, labels, num_items_in_batch=None):
    return 3 * functional.cross_entropy(outputs.logits.float(), labels, reduction="sum") / 4


WAYS = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "a loss of one's own": {"compute_loss_func": own_loss},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "the number of labels in the batch": {"build": llama, "train_dataset": texts(), "gradient_accumulation_steps": 2},
    "model_init": {"model_init": lambda: bert()},
}


@pytest.mark.parametrize(
    ("side", "way"),
    mostly_long(
        product(OURS, WAYS), ("callback", "a loss of one's own"), ("ORTTrainer", "the number of labels in the batch")
    ),
)
def test_training_gives_eagers_losses(tmp_path, side, way):
    ours = train(side, tmp_path, **WAYS[way])
    assert losses(ours) == pytest.approx(losses(train("eager", tmp_path, **WAYS[way])), abs=1e-5)
    assert ort_accel.report(ours.model).segments, "nothing ran on the engine"


@pytest.mark.parametrize("side", mostly_long(OURS, "ORTTrainer"))
def test_evaluation_and_prediction_run_on_the_engine(tmp_path, side):
    set_seed(0)
    model = bert()
    eager = make("eager", copy.deepcopy(model), arguments(tmp_path))
    ours = make(side, model, arguments(tmp_path))
    assert ours.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], abs=1e-5)
    numpy.testing.assert_allclose(
        ours.predict(reviews(8)).predictions, eager.predict(reviews(8)).predictions, atol=1e-5
    )
    assert ort_accel.report(ours.model).segments, "nothing ran on the engine"


def test_sequences_are_generated_as_in_eager(tmp_path):
    rows = [{**row, "labels": row["input_ids"]} for row in reviews(4)]
    args = arguments(tmp_path, ORTSeq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6)
    set_seed(0)
    model = t5().eval()
    batch = torch.stack([row["input_ids"] for row in rows])
    mask = torch.stack([row["attention_mask"] for row in rows])
    eager = model.generate(input_ids=batch, attention_mask=mask, max_length=6)
    trainer = ORTSeq2SeqTrainer(model, args)
    ours = trainer.predict(rows).predictions
    assert ours[:, : eager.shape[1]].tolist() == eager.tolist()
    assert ort_accel.report(model).segments, "nothing ran on the engine"


@pytest.mark.parametrize("side", mostly_long(OURS, "ORTTrainer"))
def test_lora_trains_and_loads_into_plain_peft(tmp_path, side):
    peft = pytest.importorskip("peft")

    def adapted():
        lora = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
        return peft.get_peft_model(bert(), peft.LoraConfig("SEQ_CLS", **lora))

    ours = train(side, tmp_path, build=adapted, save_strategy="steps", save_steps=2)
    eager = train("eager", tmp_path / "eager", build=adapted, save_strategy="steps", save_steps=2)
    assert losses(ours) == pytest.approx(losses(eager), abs=1e-5)
    set_seed(3)
    loaded = peft.PeftModel.from_pretrained(bert(), tmp_path / "checkpoint-4")
    for name, tensor in peft.get_peft_model_state_dict(eager.model).items():
        torch.testing.assert_close(peft.get_peft_model_state_dict(loaded)[name], tensor, rtol=1e-3, atol=1e-5)
    resumed = train(side, tmp_path / "more", build=adapted, resume=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == pytest.approx(losses(eager), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("side", OURS)
def test_a_search_finds_what_eager_finds(tmp_path, side):
    optuna = pytest.importorskip("optuna")

    models = []

    def model_init():
        models.append(bert())
        return models[-1]

    def search(which):
        trainer = make(
            which,
            None,
            arguments(tmp_path / which, max_steps=2, eval_strategy="steps", eval_steps=2),
            {"engine": {"compile_evaluation": True}},
            model_init=model_init,
        )
        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-4, 1e-1])},
            compute_objective=lambda metrics: metrics["eval_loss"],
            n_trials=2,
            sampler=optuna.samplers.GridSampler({"learning_rate": [1e-4, 1e-1]}, seed=0),
        )
        return best.objective, best.hyperparameters

    objective, found = search(side)
    report = ort_accel.report(models[-1])
    eager_objective, eager_found = search("eager")
    assert found == eager_found
    assert objective == pytest.approx(eager_objective, abs=1e-5)
    assert report.counters["compilations"] == 3, "forward, backward and evaluation, for all trials together"


def test_trainer_and_callback_together_accelerate_once(tmp_path):
    trainer = train("ORTTrainer", tmp_path, callbacks=[ORTAccelCallback()])
    assert losses(trainer) == pytest.approx(losses(train("eager", tmp_path)), abs=1e-5)
    assert sum(isinstance(callback, ORTAccelCallback) for callback in trainer.callback_handler.callbacks) == 1
