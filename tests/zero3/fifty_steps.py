"""One of several processes that train a model for fifty steps in each way there is. Started by test_fifty_steps.py."""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration

import ort_accel
from ort_accel.hf.accelerate_hooks import move_hooks_to_engine
from ort_accel.run import end
from ort_accel.subscribers import SubscriberManager, ZeROOffloadSubscriber
from tests.zero3 import zero_worker
from tests.zero3.zero_worker import QUIET, WORDS, bert, furthest, llama

STEPS = 50
"""Of two batches each."""


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


MODELS = {"bert": bert, "llama": llama, "t5": t5}


def blocks(model):
    """The layers that FSDP2 shards by themselves."""
    lists = ("bert.encoder.layer", "model.layers", "encoder.block", "decoder.block")
    return [block for name, part in model.named_modules() if name in lists for block in part]


def with_deepspeed(build, rank, mine, stage, **zero):
    engine = zero_worker.engine_for(build, stage, **zero)
    model = engine.module
    if mine and stage == 3:
        SubscriberManager().subscribe(model, [ZeROOffloadSubscriber(engine, QUIET)])
    elif mine:
        ort_accel.accelerate(model, QUIET)
        move_hooks_to_engine(model, (engine,))
    losses = zero_worker.train(engine, rank, STEPS)
    weights = zero_worker.weights(model) if stage == 3 else model.state_dict()
    return model, losses, weights


def with_ddp(build, rank, mine):
    torch.manual_seed(0)
    model = build()
    if mine:
        ort_accel.accelerate(model, QUIET)
    losses = zero_worker.train_plainly(DistributedDataParallel(model), rank, STEPS)
    return model, losses, model.state_dict()


def with_fsdp2(build, rank, mine):
    torch.manual_seed(0)
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh)
    if mine:
        ort_accel.accelerate(model, QUIET)
    losses = zero_worker.train_plainly(model, rank, STEPS)
    return model, losses, {name: value.full_tensor() for name, value in model.state_dict().items()}


WAYS = {
    "DDP": with_ddp,
    "ZeRO-1": partial(with_deepspeed, stage=1),
    "ZeRO-2": partial(with_deepspeed, stage=2),
    "ZeRO-3": partial(with_deepspeed, stage=3),
    "ZeRO-3, offloaded": partial(
        with_deepspeed, stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}
    ),
    "FSDP2": with_fsdp2,
}


def compared(way, build, rank):
    torch.manual_seed(0)
    start = build().state_dict()
    _, stock, expected = WAYS[way](build, rank, False)
    model, mine, weights = WAYS[way](build, rank, True)
    return {
        "stock": stock,
        "mine": mine,
        "furthest": furthest(expected, weights),
        "moved": furthest(start, expected),
        "compilations": ort_accel.report(model).to_dict()["counters"]["compilations"],
    }


def main(rank, folder, model):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch about deepspeed, once a call
    deepspeed.init_distributed("gloo")
    seen = {way: compared(way, MODELS[model], rank) for way in WAYS}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    end(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
