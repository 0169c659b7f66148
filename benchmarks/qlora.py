"""QLoRA training steps of a Llama: bitsandbytes itself and ort_accel. See `--help`.

A step is forward, backward and AdamW on the LoRA weights. The contenders take turns on the same batches. The bare
products of the base weights take turns with them, in single precision and dequantized: for all tokens, and for those
that are not padding. They bound what an engine with PyTorch's products can reach.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ort_accel
from ort_accel.cli.benchmark import machine
from ort_accel.cli.benchmark.contenders import EAGER, ORT_ACCEL
from ort_accel.cli.benchmark.timing import compare, in_turns, summary
from ort_accel.memory.malloc_settings import trim_heap
from ort_accel.memory.process_memory import reset_high_water_mark, resident

QUIET = {"engine": {"fallback": "report", "compare_with_eager": False}, "observe": {"log_level": "error"}}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SPREAD = (0.6, 0.9, 1.1, 1.4)
"""The lengths of the texts of a batch, in multiples of their mean."""
MEMORY_STEPS = 3
MIB = 2**20

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """The model, how it is quantized, and its batches."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    batch: int
    length: int
    valid: float
    quant_type: str
    block: int
    nested: bool
    bf16: bool


def qlora(
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=64)] = 1024,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    vocab: Annotated[int, typer.Option(min=8)] = 8000,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    length: Annotated[int, typer.Option(min=2)] = 512,
    valid: Annotated[float, typer.Option(min=0.01, max=1, help="The share of tokens that are not padding.")] = 0.5,
    quant_type: Annotated[str, typer.Option(help="nf4, fp4 or int8.")] = "nf4",
    block: Annotated[int, typer.Option(help="Weights in one block.")] = 64,
    nested: Annotated[bool, typer.Option(help="Double quantization.")] = True,
    bf16: Annotated[bool, typer.Option(help="Weights, and what layers compute in; fp32 without it.")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds before.")] = 3,
    losses: Annotated[int, typer.Option(min=0, help="Steps whose losses are compared.")] = 0,
    memory: Annotated[bool, typer.Option(help="Measure the peak memory, in processes of their own.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Measure QLoRA steps of bitsandbytes in eager PyTorch and on ort_accel."""
    warnings.simplefilter("ignore")
    size = Size(layers, hidden, heads, vocab, batch, length, valid, quant_type, block, nested, bf16)
    found: dict[str, Any] = {"machine": machine.facts(torch.get_num_threads()), "size": asdict(size)}
    running = {name: Running(name, size) for name in (EAGER, ORT_ACCEL)}
    bounds = {name: Products(running[EAGER].model, count) for name, count in tokens_of(size).items()}
    steps = {name: one.step for name, one in (*running.items(), *bounds.items())}
    seconds = in_turns(steps, rounds, warmup)
    found["seconds"] = {name: summary(times).to_dict() for name, times in seconds.items()}
    found["ratio"] = compare(seconds[EAGER], seconds[ORT_ACCEL]).to_dict()
    found["bounds"] = {name: compare(seconds[EAGER], seconds[name]).to_dict() for name in bounds}
    for _ in range(losses - rounds - warmup):
        for one in running.values():
            one.step()
    differences = [abs(one - other) for one, other in zip(*(one.losses for one in running.values()), strict=True)]
    found["losses"] = {"steps": len(differences), "largest difference": max(differences)}
    report = ort_accel.report(running[ORT_ACCEL].model)
    found["segments"] = [(item.graph, item.runner.value) for item in report.segments]
    found["fallbacks"] = [(item.op, item.reason.value, item.count) for item in report.fallbacks]
    found["padding"] = report.features["density.padding"].effect
    if memory:
        found["peak_mib"] = {name: _alone(name, size) for name in running}
    found["machine"]["load_after"] = machine.load()
    _show(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


class Running:
    """A model that is asked for one step after another."""

    def __init__(self, name: str, size: Size) -> None:
        self.model, self.losses = model_of(size), list[float]()
        self._optimizer = torch.optim.AdamW([it for it in self.model.parameters() if it.requires_grad], lr=1e-4)
        self._batches = batches(size)
        if name == ORT_ACCEL:
            ort_accel.accelerate(self.model, QUIET)

    def step(self) -> None:
        """Train on the next batch."""
        loss = self.model(**next(self._batches)).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


class Products:
    """The products of all quantized layers with rows and with their gradients, and nothing else of a step."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        layers = [one for one in model.modules() if isinstance(one, Linear4bit | Linear8bitLt)]
        self._counts = Counter((one.out_features, one.in_features) for one in layers)
        self._weights = {shape: torch.randn(shape) for shape in self._counts}
        self._rows = {width: torch.randn(rows, width) for shape in self._counts for width in shape}

    def step(self) -> None:
        """Multiply as forward and backward do."""
        for (outer, inner), count in self._counts.items():
            weight, rows, grads = self._weights[outer, inner], self._rows[inner], self._rows[outer]
            for _ in range(count):
                torch.mm(rows, weight.t())
                torch.mm(grads, weight)


def tokens_of(size: Size) -> dict[str, int]:
    """Returns the numbers of all tokens of the first batch, and of those that are not padding."""
    mask = next(batches(size))["attention_mask"]
    return {"products of all tokens": mask.numel(), "products of valid tokens": int(mask.sum())}


def model_of(size: Size) -> nn.Module:
    """Returns a Llama with random weights, quantized linear layers and LoRA on each of them."""
    dtype = torch.bfloat16 if size.bf16 else torch.float32
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocab,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    in_4_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": size.quant_type,
        "bnb_4bit_use_double_quant": size.nested,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_blocksize": size.block,
    }
    quantized = BitsAndBytesConfig(**({"load_in_8bit": True} if size.quant_type == "int8" else in_4_bits))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=quantized, device_map={"": "cpu"}
        )
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM")).train()


def batches(size: Size) -> Iterator[Batch]:
    """Yields batches of texts of different lengths; without padding if all tokens are valid."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(0, size.vocab, (size.batch, size.length), generator=generator)
        shares = [size.valid * SPREAD[row % len(SPREAD)] for row in range(size.batch)]
        lengths = [size.length if size.valid == 1 else min(round(size.length * share), size.length) for share in shares]
        mask = (torch.arange(size.length) < torch.tensor(lengths)[:, None]).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _alone(name: str, size: Size) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_of, name, size).result()


def peak_of(name: str, size: Size) -> float:
    """Returns by how many MiB the resident set of a process grows at most over what it has before a model is there."""
    warnings.simplefilter("ignore")
    running = Running(name, size)
    for _ in range(MEMORY_STEPS):
        running.step()
    trim_heap()
    weights = resident() or 0
    running.step()
    reset_high_water_mark()
    running.step()
    return ((resident("VmHWM") or 0) - weights) / MIB


def _show(found: dict[str, Any]) -> None:
    ratio, medians = found["ratio"], {name: times["median"] for name, times in found["seconds"].items()}
    lines: list[Callable[[], str]] = [
        lambda: ", ".join(f"{name} {1e3 * median:.0f} ms" for name, median in medians.items()),
        lambda: f"{EAGER} / {ORT_ACCEL} {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
        lambda: ", ".join(f"{EAGER} / {name} {bound['ratio']:.2f}x" for name, bound in found["bounds"].items()),
        lambda: f"losses of {found['losses']['steps']} steps: within {found['losses']['largest difference']:.1e}",
        lambda: f"padding: {found['padding']}",
        lambda: f"peak MiB: {found.get('peak_mib', 'not measured')}",
        lambda: machine.in_short(found["machine"]),
    ]
    for line in lines:
        typer.echo(line())


if __name__ == "__main__":
    typer.run(qlora)
