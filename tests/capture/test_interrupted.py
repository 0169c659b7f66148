"""A compilation that is interrupted from the keyboard ends as such, and the model can be used again."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import pytest
from torch._dynamo.output_graph import OutputGraph

import ort_accel
from ort_accel.compiler import autograd_graphs, skip_rows
from tests.against_eager import assert_step_as_eager, report
from tests.capture.language_model import Model, batch, engine
from tests.tiers import mostly_long

PLACES: list[tuple[Any, str]] = [
    (autograd_graphs, "lower_graph"),
    (skip_rows, "propose"),
    (OutputGraph, "call_user_compiler"),
]


@pytest.mark.parametrize(("owner", "name"), mostly_long(PLACES, PLACES[0]))
def test_an_interrupted_compilation(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    eager = Model()
    ours = ort_accel.accelerate(copy.deepcopy(eager), engine())
    monkeypatch.setattr(owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        ours(**batch(4, 10))
    monkeypatch.undo()
    said = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(said) < 30, "as many lines as a call of the model takes"
    assert not report(ours).segments
    assert_step_as_eager(eager, ours, **batch(4, 10))
