"""One of two processes that train under ZeRO with and without the engine. Started by test_layer_gathering.py."""

import json
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero import stage3
from packaging.specifiers import SpecifierSet
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.compiler.layer_by_layer import layers_of
from ort_accel.hf.accelerate_hooks import move_hooks_to_engine
from ort_accel.run import end
from ort_accel.subscribers import SubscriberManager, ZeROOffloadSubscriber
from ort_accel.zero3 import activate, deepspeed_interfaces, live_parameters
from ort_accel.zero3.gradient_averaging import average_parts

WORDS = 64
QUIET = {"engine": {"compare_with_eager": False}, "observe": {"log_level": "error"}}


def llama(layers=4, **more):
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, intermediate_size=64, **sizes, **more))


def one_layer():
    return llama(1)


def bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes))


def lora():
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1))


def checkpointing():
    model = llama()
    model.activation_checkpointing_enable()
    return model


class Skipping(nn.Module):
    """Leaves a layer out in every second call, so that what is gathered ahead is not what comes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.calls = 0

    def forward(self, input_ids, labels):
        values = nn.functional.one_hot(input_ids % 8, 8).float()
        self.calls += 1
        for position, layer in enumerate(self.layers):
            if position != 2 or self.calls % 2:
                values = torch.tanh(layer(values))
        return {"loss": values.square().mean()}


MODELS = {
    "llama": llama,
    "bert": bert,
    "lora": lora,
    "checkpointing": checkpointing,
    "skipping": Skipping,
}


def engine_for(build, stage, **zero):
    torch.manual_seed(0)
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=0.1, momentum=0.5),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )
    return engine


def batches(rank, count, lengths=(7,)):
    """Rows that count up from anywhere: a rule to learn. Where there is none, training makes any rounding large."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(count):
        starts = torch.randint(0, WORDS - 1, (2, 1), generator=generator)
        ids = 1 + (starts + torch.arange(lengths[step % len(lengths)])) % (WORDS - 1)
        yield {"input_ids": ids, "labels": ids}


def train(engine, rank, steps=8, lengths=(7,)):
    torch.manual_seed(rank)
    losses = []
    for batch in batches(rank, 2 * steps, lengths):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model):
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def furthest(weights_a, weights_b):
    return max((weights_a[name] - weights_b[name]).abs().max().item() for name in weights_a)


class Watch:
    """What is gathered, what memory of it is alive, and what gradients are, when a layer begins forward or backward."""

    def __init__(self, model, layers):
        self.model, self.seen, self.refs = model, [], {}
        for layer in layers:
            layer.register_forward_pre_hook(self.look)
            layer.register_full_backward_pre_hook(self.look)

    def look(self, *_):
        for parameter in self.model.parameters():
            storage = parameter.data.untyped_storage()
            if parameter.ds_status.name == "AVAILABLE":
                self.refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() // 4)
        self.refs = {key: (ref, size) for key, (ref, size) in self.refs.items() if not ref.expired()}
        alive = sum(size for _, size in self.refs.values())
        gradients = sum(p.grad.numel() for p in self.model.parameters() if p.grad is not None)
        self.seen.append((live_parameters(self.model), alive, gradients))


def numel(module):
    return sum(parameter.ds_numel for parameter in module.parameters())


def stage_3(name, rank, **zero):
    """A model under stage 3, in plain PyTorch and on the engine."""
    stock = engine_for(MODELS[name], 3, **zero)
    lengths = (7, 9) if name == "llama" else (7,)
    stock_losses, stock_weights = train(stock, rank, lengths=lengths), weights(stock.module)
    engine = engine_for(MODELS[name], 3, **zero)
    model = engine.module
    with SubscriberManager().subscribe(model, [ZeROOffloadSubscriber(engine, QUIET)]):
        layers = layers_of(model)
        watch = Watch(model, layers)
        losses = train(engine, rank, lengths=lengths)
        report = ort_accel.report(model).to_dict()
    live, alive, gradients = map(max, zip(*watch.seen, strict=True))
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return {
        "stock": stock_losses,
        "mine": losses,
        "furthest": furthest(stock_weights, weights(model)),
        "report": report,
        "live": live,
        "alive": alive,
        "gradients": gradients,
        "left behind": [name for name in vars(engine.optimizer) if deepspeed_interfaces.AVERAGE_METHOD in name],
        "looks": len(watch.seen),
        "layer": max(map(numel, layers)),
        "tables": sum({id(table.weight): numel(table) for table in tables}.values()),
        "whole": numel(model),
    }


def whole_model(rank, stage):
    """The same of a model that is captured as a whole: ZeRO stages 1 and 2, or DDP for stage 0."""
    found = {}
    for side in ("stock", "mine"):
        torch.manual_seed(0)
        if stage:
            engine = engine_for(one_layer, stage)
            model = engine.module
            if side == "mine":
                ort_accel.accelerate(model, QUIET)
                move_hooks_to_engine(model, (engine,))
            found[side] = train(engine, rank)
        else:
            model = one_layer()
            if side == "mine":
                ort_accel.accelerate(model, QUIET)
            found[side] = train_plainly(DistributedDataParallel(model), rank)
        found[f"weights {side}"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found["report"] = ort_accel.report(model).to_dict()
    return found | {"furthest": furthest(found.pop("weights stock"), found.pop("weights mine"))}


def train_plainly(model, rank, steps=8):
    """The same without DeepSpeed: under DDP or FSDP2."""
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for number, batch in enumerate(batches(rank, 2 * steps)):
        last = number % 2 == 1
        waiting = not last and hasattr(model, "no_sync")
        with model.no_sync() if waiting else torch.enable_grad():
            loss = model(**batch)["loss"]
            (loss / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluation(rank, folder):
    """Evaluation, and saving a model, between and after steps."""
    found = {}
    for side in ("stock", "mine"):
        engine = engine_for(llama, 3, stage3_gather_16bit_weights_on_model_save=True)
        if side == "mine":
            manager = SubscriberManager().subscribe(engine.module, [ZeROOffloadSubscriber(engine, QUIET)])
        losses = train(engine, rank, 2)
        engine.eval()
        with torch.no_grad():
            losses += [engine(**batch)["loss"].item() for batch in batches(rank, 2)]
        live = live_parameters(engine.module)
        engine.train()
        losses += train(engine, rank, 2)
        engine.save_16bit_model(folder, f"{side}.bin")
        engine.save_checkpoint(folder, side)
        found[side] = losses
    manager.unsubscribe()
    found["live after evaluation"] = live
    found["restored"] = train(engine, rank, 2)
    if rank == 0:
        stock, mine = (torch.load(Path(folder, f"{side}.bin")) for side in ("stock", "mine"))
        found["same keys"] = list(stock) == list(mine)
        found["furthest"] = furthest(stock, mine)
    engine.load_checkpoint(folder, "stock")
    found["again from the checkpoint"] = train(engine, rank, 2)
    return found


def refusals(rank):
    """Models that stay plain, each with its reason."""
    found = {}
    for name, config, changed in (
        ("version", QUIET, mock.patch.object(activate, "SUPPORTED_VERSIONS", SpecifierSet(">=1"))),
        ("switch", QUIET | {"distributed": {"zero3": False}}, nullcontext()),
        ("lacking", QUIET, mock.patch.object(deepspeed_interfaces, "_OFFLOAD_NAMES", ("a_method_of_later",))),
    ):
        engine = engine_for(Skipping, 3)
        with changed:
            SubscriberManager().subscribe(engine.module, [ZeROOffloadSubscriber(engine, config)])
        (feature,) = ort_accel.report(engine.module).to_dict()["features"]
        found[name] = {"losses": train(engine, rank, 2), **feature}
    return found


def parts(rank):
    """What each process keeps of gradients, as DeepSpeed shares them and as the engine does."""
    found = {}
    for name, dtype, shapes in (
        ("even", torch.float32, [(4, 6), (3,), (6, 8)]),
        ("odd", torch.float32, [(5, 3), (1,), (7,), (4, 4)]),
        ("one", torch.float32, [(3, 3)]),
        ("small", torch.bfloat16, [(5, 3), (2, 2)]),
    ):
        numbers = torch.Generator().manual_seed(rank)
        gradients = [torch.randn(shape, generator=numbers).to(dtype) for shape in shapes]
        usual = stage3.reduce_scatter_coalesced([gradient.clone() for gradient in gradients])
        ours = average_parts(None, gradients)
        found[name] = {
            "sizes": [part.numel() for part in usual] == [part.numel() for part in ours],
            "types": {str(part.dtype) for part in ours} == {str(dtype)},
            "furthest": (torch.cat(usual) - torch.cat(ours)).abs().sum().item(),
        }
    return found


def runs(rank, folder):
    offloaded = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {
        **{name: partial(stage_3, name, rank) for name in MODELS},
        "offloaded": partial(stage_3, "skipping", rank, **offloaded),
        **{f"stage {stage}": partial(whole_model, rank, stage) for stage in (0, 1, 2)},
        "evaluation": partial(evaluation, rank, folder),
        "refusals": partial(refusals, rank),
        "parts": partial(parts, rank),
    }


def main(rank, folder, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch about deepspeed, once a call
    deepspeed.init_distributed("gloo")
    seen = {name: runs(rank, folder)[name]() for name in names}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
