"""Fifty steps of two batches, dropout on, in two and four processes: what is learned is what is learned in eager."""

import importlib.util
import json

import pytest

from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
WAYS = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offloaded", "FSDP2"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["bert", "llama", "t5"])
def test_fifty_steps_equal_those_without_the_engine(tmp_path, model, ranks):
    run_ranks("tests.zero3.fifty_steps", tmp_path, model, ranks=ranks, timeout=1200.0)
    for rank in range(ranks):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(seen) == WAYS
        for way, run in seen.items():
            assert run["compilations"] > 0, way
            assert len(run["mine"]) == 100
            assert run["moved"] > 0.01, f"{way}: nothing was learned"
            assert run["mine"] == pytest.approx(run["stock"], rel=1e-5, abs=1e-5), way
            assert run["furthest"] < 1e-5, way
