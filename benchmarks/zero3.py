"""A training step under DeepSpeed ZeRO-3, with and without the engine, in the same processes. See `--help`."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import deepspeed
import torch
import torch.distributed as dist
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from ort_accel.cli.benchmark import machine
from ort_accel.run import end
from ort_accel.subscribers import SubscriberManager, ZeROOffloadSubscriber
from ort_accel.zero3 import live_parameters

STOCK, SPARING, OURS = "deepspeed", "deepspeed, by layers", "ort_accel"
"""DeepSpeed as it comes, DeepSpeed told to gather and collect no more than ort_accel does, and ort_accel."""


def measure(
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of a Llama.")] = 8,
    hidden: Annotated[int, typer.Option(min=64, help="Its width.")] = 512,
    vocab: Annotated[int, typer.Option(min=1, help="Its vocabulary.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in each process.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure forward, backward and optimizer step, each contender in turn. Start it with torchrun:

    torchrun --nproc_per_node 2 benchmarks/zero3.py
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    deepspeed.init_distributed("gloo")
    facts = machine.facts(threads)
    engines = {name: _engine(name, layers, hidden, vocab, batch) for name in (STOCK, SPARING, OURS)}
    ids = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = {name: [_step(engine, ids) for _ in range(4)] for name, engine in engines.items()}  # records and compiles
    for name in (SPARING, OURS):
        torch.testing.assert_close(losses[name], losses[STOCK], rtol=1e-5, atol=1e-5)
    live = {name: _live(engine, ids) for name, engine in engines.items()}
    seconds = _in_turns(engines, ids, rounds)
    if dist.get_rank() == 0:
        result: dict[str, Any] = {
            "machine": facts | {"load_after": machine.load(), "deepspeed": deepspeed.__version__},
            "processes": dist.get_world_size(),
            "model": {"layers": layers, "hidden": hidden, "vocab": vocab, "batch": batch, "length": length},
            "parameters": sum(p.ds_numel for p in engines[OURS].module.parameters()),
            "most_gathered": live,
            "seconds": seconds,
            "medians": {name: sorted(times)[len(times) // 2] for name, times in seconds.items()},
        }
        _show(result)
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=1) + "\n")
    end(0)


def _engine(name: str, layers: int, hidden: int, vocab: int, batch: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    model = LlamaForCausalLM(config)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    sparing = {
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": layer,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # a Trainer's default
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, **(sparing if name == SPARING else {})},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if name == OURS:
        quiet = {"observe": {"log_level": "error"}}
        SubscriberManager().subscribe(model, [ZeROOffloadSubscriber(engine, quiet)])
    return engine


def _step(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def _live(engine: Any, ids: torch.Tensor) -> int:
    """The most parameters that are gathered when a layer's forward or backward begins."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(live_parameters(engine.module))

    layers = engine.module.model.layers
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    handles += [layer.register_full_backward_pre_hook(look) for layer in layers]
    _step(engine, ids)
    for handle in handles:
        handle.remove()
    return max(seen)


def _in_turns(engines: dict[str, Any], ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step on the slowest process; every round begins with another contender."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        names = list(engines)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            _step(engines[name], ids)
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            found[name].append(spent.item())
    return found


def _show(result: dict[str, Any]) -> None:
    ours = result["medians"][OURS]
    typer.echo(f"{'':20}     step  times ort_accel's    gathered at most")
    for name, median in result["medians"].items():
        typer.echo(f"{name:20} {median:6.3f} s {median / ours:17.2f}x  {result['most_gathered'][name]:18,}")
    typer.echo(f"of {result['parameters']:,} parameters")


if __name__ == "__main__":
    typer.run(measure)
