"""A check of what tensors hold divides no graph, fails as in eager mode, and other compilers see nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.integrations.neftune import neftune_post_forward_hook

import ort_accel
from ort_accel.hf.checkpointing_hooks import keep_hooks
from ort_accel.reporting.report import State
from tests.against_eager import assert_step_as_eager, assert_two_graphs_each_way, compilations, pair, report
from tests.pictures import placed, tokens


class Pictures(nn.Module):
    """Embeds tokens, and puts parts of pictures among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

    def scores(self, ids: Tensor, parts: Tensor) -> Tensor:
        scores: Tensor = self.outer(placed(self.embedding(ids), ids, self.inner(parts)))
        return scores

    def forward(self, ids: Tensor, parts: Tensor) -> Tensor:
        return self.scores(ids, parts).square().mean()


def batch(rows: int, length: int, marked: int = 2, parts: int = 2) -> tuple[Tensor, Tensor]:
    return tokens(rows, length, marked), torch.randn(rows * parts, 16)


def breaks(model: nn.Module) -> list[str]:
    return [item.detail for item in report(model).fallbacks if item.op == "a graph break"]


FRUGAL = [{"level": 1}, {"budget": "1GiB"}, {"early_gradient_release": True}]


@pytest.mark.parametrize("memory", [{}, *FRUGAL], ids=str)
def test_a_check_divides_no_graph_and_its_text_fixes_no_size(memory: dict[str, object]) -> None:
    eager, ours = pair(Pictures(), {"memory": memory})
    compiled = []
    for rows, length in [(2, 8), (3, 9), (5, 12), (2, 7)]:
        assert_step_as_eager(eager, ours, *batch(rows, length))
        compiled.append(compilations(ours))
    assert_two_graphs_each_way(compiled)
    assert not breaks(ours)


@pytest.mark.parametrize("trains", [True, False])
def test_a_check_that_fails_is_eagers_error_and_the_next_batch_runs(trains: bool) -> None:
    eager, ours = pair(Pictures(), {"engine": {"compile_evaluation": True}})
    with torch.set_grad_enabled(trains):
        torch.testing.assert_close(ours(*batch(2, 8)).isfinite(), torch.tensor(True))
        for marked in (1, 3):
            with pytest.raises(ValueError, match=f"{2 * marked} tokens for 4 parts"):
                ours(*batch(2, 8, marked))
    assert_step_as_eager(eager, ours, *batch(2, 8))


def test_what_is_used_of_a_number_in_a_tensor_divides_a_graph_as_before() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * x.max().item())

    eager, ours = pair(Scaled())
    assert_step_as_eager(eager, ours, torch.randn(3, 4))
    assert any("Tensor.item()" in text for text in breaks(ours))


def test_a_size_in_a_text_may_be_a_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_2, self.of_3, self.of_4 = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, f"of_{x.shape[0]}")(x)

    eager, ours = pair(Named())
    for rows in (2, 3, 4, 3, 2):
        assert_step_as_eager(eager, ours, torch.randn(rows, 4))


def test_other_compilers_keep_their_ways() -> None:
    ort_accel.accelerate(Pictures())(*batch(2, 8))
    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    torch.compile(Pictures(), backend=backend)(*batch(2, 8))
    assert len(graphs) > 1


def test_a_check_holds_where_rows_are_left_out_as_well() -> None:
    class Tagger(Pictures):
        def forward(self, ids: Tensor, parts: Tensor, labels: Tensor | None = None) -> Tensor:
            return nn.functional.cross_entropy(self.scores(ids, parts).transpose(1, 2), labels)

    eager, ours = pair(Tagger())
    for rows, length, marked in [(2, 8, 2), (3, 9, 2), (3, 9, 3), (2, 12, 2)]:
        labels = torch.randint(0, 4, (rows, length)).masked_fill(torch.rand(rows, length) < 0.7, -100)
        labels[0, 0] = 1
        inputs = *batch(rows, length, marked), labels
        if marked == 2:
            assert_step_as_eager(eager, ours, *inputs)
        else:
            with pytest.raises(ValueError, match="9 tokens for 6 parts"):
                ours(*inputs)
    assert report(ours).features["density.labels"].state is State.APPLIED


def test_an_activation_that_is_to_require_gradients_for_checkpoints_divides_no_graph() -> None:
    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    eager, ours = pair(T5ForConditionalGeneration(config).train())
    for model in (eager, ours):
        model.gradient_checkpointing_enable()
    for rows in (8, 3):
        ids = torch.randint(0, 40, (rows, 8))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=ids, use_cache=False)
    assert not breaks(ours)


class GradientOfPositions(nn.Module):
    """Reads the gradient of an activation, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = (x * 2).detach().requires_grad_(True)
        energy = self.layer(positions).sin().sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        return force.square().sum()


def test_a_gradient_that_a_model_reads_is_as_in_eager_mode() -> None:
    eager, ours = pair(GradientOfPositions())
    for rows in (2, 3):
        torch.testing.assert_close(ours(torch.ones(rows, 4)), eager(torch.ones(rows, 4)))


def test_a_hook_for_checkpointing_divides_no_graph_and_is_added_once() -> None:
    keep_hooks()
    eager, ours = pair(llama_with_adapters())
    compiled = []
    for rows in (2, 3, 5, 2):
        for model in (eager, ours):
            model.gradient_checkpointing_disable()
            model.gradient_checkpointing_enable()
        ids = torch.randint(0, 40, (rows, 8))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=ids)
        compiled.append(compilations(ours))
    assert_two_graphs_each_way(compiled)
    assert not breaks(ours)
    assert len(ours.get_input_embeddings()._forward_hooks) == 1


def test_noise_in_embeddings_divides_no_graph() -> None:
    eager, ours = pair(llama_with_adapters())
    for model in (eager, ours):
        embedding: Any = model.get_input_embeddings()
        embedding.neftune_noise_alpha = 5.0
        embedding.register_forward_hook(neftune_post_forward_hook)
    compiled = []
    for rows in (2, 3, 5, 2):
        ids = torch.randint(0, 40, (rows, 8))
        assert_step_as_eager(eager, ours, input_ids=ids, labels=ids)
        compiled.append(compilations(ours))
    assert_two_graphs_each_way(compiled)
    assert not breaks(ours)


def llama_with_adapters() -> Any:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return model.train()
