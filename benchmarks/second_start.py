"""How long the first step of a training takes, in the first start and in later ones that find a full cache.

    python benchmarks/second_start.py --models bert llama t5 qwen3-moe --starts 3 --json out.json

Each start is a process of its own. Measured is the time from `accelerate` to the end of the optimizer's first step;
torch, transformers and the engine are imported and the model is built before. Processor time is that of all threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ort_accel.cli.benchmark import machine

LAYERS = 12


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=LAYERS))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, **_small()))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 384, "d_kv": 64, "d_ff": 1536, "num_heads": 6, "vocab_size": 16000}
    return T5ForConditionalGeneration(T5Config(num_layers=LAYERS, decoder_start_token_id=0, **sizes))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 64}
    config = Qwen3MoeConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, **_small(), **experts)
    return Qwen3MoeForCausalLM(config)


MODELS = {"bert": bert, "llama": llama, "t5": t5, "qwen3-moe": qwen3_moe}


def _small() -> dict[str, int]:
    return {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024, "vocab_size": 16000}


def batch_for(name: str) -> dict[str, torch.Tensor]:
    """Four sequences of 64 tokens, two of them padded."""
    ids = torch.randint(5, 16000, (4, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 32:], mask[2, 21:] = 0, 0
    labels = torch.tensor([0, 1, 0, 1]) if name == "bert" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def one_start(name: str, folder: str) -> None:
    """Train one step, and print what it took."""
    import ort_accel
    import ort_accel.engine

    torch.manual_seed(0)
    model, batch = MODELS[name]().train(), batch_for(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wall, processor = time.perf_counter(), time.process_time()
    ort_accel.accelerate(model, {"version": 1, "engine": {"cache_dir": folder}, "observe": {"log_level": "error"}})
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    took = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
    report = ort_accel.report(model)
    counted = {key: report.counters[key] for key in ("compilations", "graphs from an earlier start")}
    print("TOOK", json.dumps(took | counted | {"loss": loss.item(), "notes": report.notes}))


def start(name: str, folder: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", name, folder]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("TOOK"))
    found: dict[str, Any] = json.loads(line.removeprefix("TOOK "))
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--starts", type=int, default=3, help="later starts for each first one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one_start(*arguments.one)
        return
    found: dict[str, Any] = {}
    record = {"machine": machine.facts(torch.get_num_threads()), "found": found}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            first, *later = (start(name, folder) for _ in range(1 + arguments.starts))
        found[name] = {"first": first, "later": later}
        middle = {key: median(item[key] for item in later) for key in ("wall_s", "processor_s")}
        shares = {key: middle[key] / first[key] for key in middle}
        print(
            f"{name:10} wall {first['wall_s']:5.1f} s, then {middle['wall_s']:5.1f} ({shares['wall_s']:.2f});"
            f" processor {first['processor_s']:5.1f} s, then {middle['processor_s']:5.1f}"
            f" ({shares['processor_s']:.2f})",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
