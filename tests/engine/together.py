"""One of two processes that train together, with and without the engine. Started by test_together.py."""

import json
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ort_accel
from ort_accel.run import end
from ort_accel.runtime.session import Session
from tests.memory_limit import memory_limit

WORDS = 64
ENGINE = {"compare_with_eager": False}
QUIET = {"engine": ENGINE, "observe": {"log_level": "error"}}
COMPILED = QUIET | {"engine": ENGINE | {"compile_evaluation": True}}
"""Also for a call without gradients, so that its graphs can be counted."""


class Layer(nn.Module):
    """One of a kind, but for a number that leads to another graph."""

    def __init__(self, turns):
        super().__init__()
        self.turns = turns
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, values):
        for _ in range(self.turns):
            values = values + self.outer(torch.cos(self.inner(values)))
        return values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Layer(turns) for turns in (1, 2, 1))
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids, labels):
        values = self.table(input_ids)
        for layer in self.layers:
            values = layer(values)
        return {"loss": nn.functional.cross_entropy(self.head(values).flatten(0, 1), labels.flatten())}


def checkpointing_llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # not for the processes that end badly

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, intermediate_size=64, **sizes))
    model.activation_checkpointing_enable()
    return model


def by_layers(model):
    return shard([*getattr(model, "model", model).layers, model])


def by_parts(model):
    return shard([*(layer.inner for layer in model.layers), *model.layers, model])


def shard(modules):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh)
    return modules[-1]


SHARDED = {
    "checkpointing by layers": (checkpointing_llama, by_layers),
    "net by layers": (Net, by_layers),
    "net by parts of layers": (Net, by_parts),
}


def batches(rank, count, lengths):
    generator = torch.Generator().manual_seed(rank)
    for step in range(count):
        ids = torch.randint(1, WORDS, (2, lengths[step % len(lengths)]), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def train(model, rank, count=8, lengths=(7,)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for batch in batches(rank, count, lengths):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def furthest(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((whole(a.detach()) - whole(b.detach())).abs().max().item() for a, b in pairs)


def sharded(name, rank):
    """A model under FSDP2, in plain PyTorch and on the engine."""
    build, spread = SHARDED[name]
    models = []
    for side in ("stock", "mine"):
        torch.manual_seed(0)
        model = build()
        if side == "mine" and name == "net by layers":
            ort_accel.accelerate(model, COMPILED)  # before it is sharded, as by a callback of a Trainer
        models.append(spread(model))
    stock, mine = models
    ort_accel.accelerate(mine, COMPILED)
    found = {"stock": train(stock, rank, lengths=(7, 9)), "mine": train(mine, rank, lengths=(7, 9))}
    with torch.no_grad():
        for side, model in (("stock", stock), ("mine", mine)):
            found[side].append(model.eval()(**next(batches(rank, 1, (5,))))["loss"].item())
    report = ort_accel.report(mine).to_dict()
    ort_accel.restore(mine)
    found["restored"] = [mine(**next(batches(rank, 1, (5,))))["loss"].item()]
    return found | {"furthest": furthest(stock, mine), "report": report}


def data_parallel(rank, config=QUIET, **how):
    """The same under DDP; both sides in the same way."""
    found, models = {}, []
    for side in ("stock", "mine"):
        torch.manual_seed(0)
        model = Net()
        if side == "mine":
            ort_accel.accelerate(model, config)
        together = DistributedDataParallel(model)
        with Join([together]):
            found[side] = train(together, rank, **how)
        models.append(model)
    return found | {"furthest": furthest(*models), "report": ort_accel.report(models[1]).to_dict()}


def failing_in_one(rank):
    """ONNX Runtime fails in one process only, in the third step and the fourth."""
    calls, run = [], Session.__call__

    def call(self, feeds):
        calls.append(1)
        if rank == 1 and 4 < len(calls) < 8:
            raise RuntimeError("no memory left for a tensor")
        return run(self, feeds)

    with mock.patch.object(Session, "__call__", call):
        return data_parallel(rank)


def end_badly(rank, how, folder):
    """Train, and let one process leave the other one alone in the third step. The other one writes down how it ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        leave_alone(rank, how)
    except RuntimeError:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


def leave_alone(rank, how):
    model = ort_accel.accelerate(Net(), QUIET)
    together = DistributedDataParallel(model)
    train(together, rank, count=2, lengths=(7, 9) if how == "no memory in the engine" else (7,))
    if rank == 1:
        if how == "a shorter dataset":
            return
        if how == "an error":
            raise MemoryError("of this process alone")
        if how == "no memory in the engine":
            ids = torch.ones(2, 200_000, dtype=torch.long)
            with memory_limit(64):
                together(input_ids=ids, labels=ids)
        if how == "no memory in PyTorch":
            with memory_limit(64):
                torch.ones(2**25)
        model.head.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    train(together, rank, count=6)


def runs(rank):
    elsewhere = {"engine": ENGINE | {"run_in_pytorch": ["aten.cos"] if rank else []}}
    return {
        **{name: partial(sharded, name, rank) for name in SHARDED},
        "other shapes": partial(data_parallel, rank, lengths=(3, 4, 5, 6) if rank else (7,)),
        "a shorter dataset": partial(data_parallel, rank, count=5 if rank else 8),
        "another operator in PyTorch": partial(data_parallel, rank, QUIET | elsewhere),
        "a failure in ONNX Runtime": partial(failing_in_one, rank),
    }


def main(rank, folder, *names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {name: runs(rank)[name]() for name in names}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
