"""The benchmark of architectures: models exist and take their batches, and lines compare with the better rival."""

import inspect

import pytest
import transformers

from benchmarks.architectures import ALLOWED, ARCHITECTURES, WITHOUT, _line, _summary, batch_of, built
from ort_accel.cli.benchmark.contenders import EAGER, INDUCTOR, ORT_ACCEL


def figures(eager: float, inductor: float, ours: float, distance: float = 0.0) -> dict[str, object]:
    seconds = {EAGER: eager, INDUCTOR: inductor, WITHOUT: 2 * ours, ORT_ACCEL: ours}
    return {"seconds": seconds, "distance": {EAGER: ALLOWED / 2, INDUCTOR: 0.0, WITHOUT: distance, ORT_ACCEL: distance}}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_class_takes_its_batches(kind):
    name, _ = ARCHITECTURES[kind]
    accepted = inspect.signature(getattr(transformers, name).forward).parameters
    assert set(batch_of(kind, 0)) <= set(accepted)


def test_a_model_trains_on_another_batch_for_each_number():
    model = built("gpt2")
    one, other = batch_of("gpt2", 0), batch_of("gpt2", 1)
    assert not one["input_ids"].equal(other["input_ids"])
    assert model(**one).loss.isfinite()


def test_a_line_compares_with_eager_and_with_the_better_of_both():
    assert "2.00x eager    1.50x the better" in _line(figures(eager=0.2, inductor=0.15, ours=0.1))


def test_a_line_says_that_gradients_are_wrong():
    assert "WRONG" in _line(figures(0.2, 0.15, 0.1, distance=2 * ALLOWED))
    assert "WRONG" not in _line(figures(0.2, 0.15, 0.1))


def test_gradients_may_be_as_far_from_exact_ones_as_eagers():
    found = figures(0.2, 0.15, 0.1, distance=2 * ALLOWED)
    found["distance"][EAGER] = 2 * ALLOWED
    assert "WRONG" not in _line(found)


def test_the_summary_counts_architectures_behind_the_better_of_both():
    found = [figures(0.2, 0.15, 0.1), figures(0.2, 0.09, 0.1), figures(0.3, 0.3, 0.1)]
    assert _summary(found) == "3 architectures: median 2.00x eager; 1 slower than the better of both"
