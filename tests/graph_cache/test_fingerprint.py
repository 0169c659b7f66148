"""Graphs with operators of other packages are kept where a released version says what the operators do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ort_accel
from ort_accel.graph_cache import fingerprint
from ort_accel.reporting.report import Report
from tests.against_eager import report

PACKAGE = "small_package"


@pytest.fixture(scope="module")
def operator() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator of a package, with a backward of its own."""

    @torch.library.custom_op(f"{PACKAGE}::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda _, gradient: gradient * 2)
    return torch.ops.small_package.doubled


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Installs the package in a version. The fingerprint has its version."""
    monkeypatch.setattr(fingerprint, "PACKAGES", (*fingerprint.PACKAGES, PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(version: str, *files: str) -> None:
        for folder in tmp_path.glob("*.dist-info"):
            folder.rename(folder.with_suffix(".removed"))
        folder = tmp_path / f"{PACKAGE}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        for name in files:
            (folder / name).write_text('{"url": "file:///home/me/small_package", "dir_info": {"editable": true}}')
        fingerprint._software.cache_clear()

    yield put
    fingerprint._software.cache_clear()


class Model(nn.Module):
    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.operator = nn.Linear(8, 16), nn.Linear(16, 4), operator

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operator(self.first(x)))


def started(make: Callable[[], nn.Module], folder: Path, **batch: Tensor) -> tuple[float, Report]:
    """The loss and the report of a step of a new model that looks for its graphs in a folder."""
    torch.manual_seed(0)
    engine = {"cache_dir": str(folder), "compare_with_eager": False}
    model = ort_accel.accelerate(make(), {"version": 1, "engine": engine})
    result = model(**batch)
    loss = result.loss if hasattr(result, "loss") else result.square().mean()
    loss.backward()
    return loss.item(), report(model)


def taken(found: Report) -> int:
    return found.counters["graphs from an earlier start"]


def test_a_graph_with_an_operator_of_a_release_is_taken_again(operator, install, tmp_path):
    batch = {"x": torch.ones(3, 8)}
    install("1.2")
    loss, first = started(lambda: Model(operator), tmp_path / "cache", **batch)
    again, second = started(lambda: Model(operator), tmp_path / "cache", **batch)
    assert taken(first) == 0 < taken(second), first.notes
    assert second.counters["compilations"] == 0
    assert again == loss
    install("1.3")
    assert taken(started(lambda: Model(operator), tmp_path / "cache", **batch)[1]) == 0


@pytest.mark.parametrize(
    "installed", [("1.2.dev3",), ("1.2+mine",), ("1.2", "direct_url.json")], ids=["development", "local", "editable"]
)
def test_a_graph_with_an_operator_that_no_release_has_is_not_kept(operator, install, tmp_path, installed):
    install(*installed)
    _, found = started(lambda: Model(operator), tmp_path / "cache", x=torch.ones(3, 8))
    said = f"{PACKAGE}.doubled is an operator of {PACKAGE} {installed[0]}, which is not a release"
    assert any(said in note for note in found.notes), found.notes
    assert not list((tmp_path / "cache").glob("*.graph"))


def test_a_graph_with_an_operator_of_an_unknown_package_is_not_kept(operator, tmp_path):
    _, found = started(lambda: Model(operator), tmp_path, x=torch.ones(3, 8))
    assert any("small_package.doubled is an operator of another library" in note for note in found.notes)


def test_graphs_of_a_qwen3_moe_are_taken_again(tmp_path):
    """Its experts are an operator of transformers."""
    config = Qwen3MoeConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        vocab_size=40,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    ids = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    loss, first = started(lambda: Qwen3MoeForCausalLM(config), tmp_path, **batch)
    again, second = started(lambda: Qwen3MoeForCausalLM(config), tmp_path, **batch)
    assert "transformers.grouped_mm_fallback" in str(first.to_dict())
    assert taken(first) == 0 < taken(second), first.notes
    assert second.counters["compilations"] == 0
    assert again == loss
