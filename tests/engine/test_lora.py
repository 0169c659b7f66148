"""LoRA: every kind of adapter trains as in eager mode, and frozen weights cost neither products nor memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.compiler import autograd_graphs
from ort_accel.graph.nodes import returned
from ort_accel.graph.symbolic_sizes import expression
from ort_accel.passes.common import views_behind
from tests.tiers import mostly_long

VOCAB, WIDTH, INNER = 60, 32, 56
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QUIET = {"engine": {"compare_with_eager": False}, "observe": {"log_level": "error"}}

aten = torch.ops.aten


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))


def adapted(**options: object) -> PeftModel:
    """A Llama with an adapter whose products are not zero, as they are in a new one."""
    model = get_peft_model(
        base(), LoraConfig(**({"r": 4, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | options))
    )
    stir(model)
    return model.train()


def stir(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def two_adapters() -> PeftModel:
    """Two adapters in use at a time, one of them on fewer layers."""
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    stir(model)
    model.base_model.set_adapter(["default", "other"])
    return model


KINDS: dict[str, Callable[[], PeftModel]] = {
    "plain": adapted,
    "few layers": lambda: adapted(target_modules=["q_proj", "v_proj"]),
    "dropout": lambda: adapted(lora_dropout=0.2),
    "rsLoRA": lambda: adapted(use_rslora=True),
    "DoRA": lambda: adapted(use_dora=True),
    "with a bias": lambda: adapted(lora_bias=True),
    "modules to save": lambda: adapted(modules_to_save=["lm_head", "embed_tokens"]),
    "two adapters": two_adapters,
}


def batch(number: int) -> dict[str, Tensor]:
    torch.manual_seed(number)
    ids = torch.randint(0, VOCAB, (3, 12))
    mask = (torch.arange(12) < torch.tensor([5, 8, 12])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Pair:
    """A model in eager mode and a copy on the engine, which take the same steps."""

    def __init__(self, eager: PeftModel) -> None:
        self.models = eager, ort_accel.accelerate(copy.deepcopy(eager), QUIET)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in self.models]

    def step(self, number: int) -> None:
        found = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(number)
            loss = model(**batch(number)).loss
            loss.backward()
            found.append((loss.detach(), {name: one.grad for name, one in model.named_parameters()}))
            optimizer.step()
        (loss, grads), (ours, mine) = found
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(
                mine[name], grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )

    def change(self, change: Callable[[PeftModel], object]) -> None:
        for model in self.models:
            change(model)

    def assert_compiled(self) -> None:
        report = ort_accel.report(self.models[1])
        assert report.counters["compilations"] >= 2
        assert not [item for item in report.fallbacks if item.op in ("a graph", "a graph break")]


@pytest.mark.parametrize("kind", mostly_long(KINDS, "DoRA", "two adapters"))
def test_each_kind_trains_as_in_eager_mode(kind):
    pair = Pair(KINDS[kind]())
    for number in range(3):
        pair.step(number)
    pair.assert_compiled()


def add_second(model: PeftModel) -> None:
    torch.manual_seed(5)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    stir(model)


def test_adapters_are_switched_in_the_middle_of_a_training():
    pair = Pair(adapted())
    pair.change(add_second)
    for number, name in enumerate(["default", "second", "second", "default"]):
        pair.change(lambda model, name=name: model.set_adapter(name))
        pair.step(number)
    pair.assert_compiled()


def test_adapters_are_merged_and_taken_out_again():
    pair = Pair(adapted())
    pair.step(0)
    pair.change(lambda model: model.merge_adapter())
    merged = [model(**batch(1)).loss.detach() for model in pair.models]
    torch.testing.assert_close(*merged, rtol=1e-5, atol=1e-5)
    pair.change(lambda model: model.unmerge_adapter())
    pair.step(1)
    pair.assert_compiled()


def test_an_adapter_that_is_switched_off_changes_nothing():
    pair = Pair(adapted())
    pair.step(0)
    found = []
    for model in pair.models:
        with model.disable_adapter(), torch.no_grad():
            found.append(model(**batch(1)).loss)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    pair.step(1)


@pytest.mark.parametrize("kind", mostly_long(["plain", "DoRA", "modules to save"], "modules to save"))
def test_peft_alone_loads_a_checkpoint(kind, tmp_path):
    pair = Pair(KINDS[kind]())
    pair.step(0)
    for name, model in zip(("eager", "ours"), pair.models, strict=True):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("eager", "ours")]
    assert files[0].keys() == files[1].keys()
    loaded = PeftModel.from_pretrained(base(), tmp_path / "ours").train()
    torch.testing.assert_close(loaded(**batch(1)).loss, pair.models[1](**batch(1)).loss, rtol=1e-5, atol=1e-5)
    whole = pair.models[1].merge_and_unload()
    torch.testing.assert_close(whole(**batch(1)).loss, loaded(**batch(1)).loss, rtol=1e-4, atol=1e-4)


@pytest.fixture
def graphs(monkeypatch) -> dict[str, fx.Graph]:
    """The graphs that are compiled, by name."""
    found: dict[str, fx.Graph] = {}
    original = autograd_graphs.lower_graph

    def lower(module, lowering, name, *more):
        found[name] = copy.deepcopy(module.graph)
        return original(module, lowering, name, *more)

    monkeypatch.setattr(autograd_graphs, "lower_graph", lower)
    return found


def products(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]


def test_frozen_weights_have_no_gradients_and_store_no_inputs(graphs):
    model = ort_accel.accelerate(adapted(target_modules=["q_proj", "v_proj"]), QUIET | {"density": {"padding": False}})
    model(**batch(0)).loss.backward()
    frozen = {tuple(one.shape) for one in model.parameters() if not one.requires_grad}
    made = [tuple(map(expression, node.meta["val"].shape)) for node in products(graphs["backward 0"])]
    assert made
    assert not frozen & set(made)
    assert not frozen & {shape[::-1] for shape in made}
    forward = graphs["forward 0"]
    kept = {source for item in returned(forward) if isinstance(item, fx.Node) for source in (item, *_viewed(item))}
    of_down = [node for node in products(forward) if node.meta["val"].shape[-1] == WIDTH and _depth(node) == INNER]
    assert len(of_down) == 2
    for node in of_down:
        assert not kept & set(_viewed(node.args[0], with_itself=True))


def _depth(node: fx.Node) -> int:
    left = node.args[-2]
    return int(left.meta["val"].shape[-1])


def _viewed(node: fx.Node, with_itself: bool = False) -> list[fx.Node]:
    """The tensors that a node is a view of."""
    chain = views_behind(node, with_itself=True)
    return [*([node] if with_itself else []), *(view.args[0] for view in chain)]
