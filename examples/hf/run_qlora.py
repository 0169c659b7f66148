"""Train LoRA adapters on 4-bit weights of bitsandbytes (QLoRA), on ONNX Runtime, and beside it on eager PyTorch.

python examples/hf/run_qlora.py --compare_eager
python examples/hf/run_qlora.py --hidden_size 1024 --num_hidden_layers 8 --bnb_4bit_quant_type fp4
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field

import run_clm as clm
import torch
from compare import exit_code, train_and_show
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from texts import minilm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

import ort_accel
from ort_accel.hf import ORTTrainer


@dataclass
class ScriptArguments(clm.ScriptArguments):
    """Those of run_clm.py, and those of the adapters and of the 4-bit weights."""

    hidden_size: int = field(default=512, metadata={"help": "The width of the model."})
    model_name_or_path: str = field(default="", metadata={"help": "A model; empty makes one with random weights."})
    lora_r: int = field(default=8, metadata={"help": "The rank of the adapters."})
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "The 4-bit type: nf4 or fp4."})


@dataclass
class Arguments(clm.Arguments):
    """All training arguments of transformers, with defaults that suit a small CPU."""

    output_dir: str | None = "out/qlora"


def quantized(script: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    """The model with 4-bit weights, and an adapter on each of its linear layers."""
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=script.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        if not script.model_name_or_path:
            clm.llama(script, tokenizer).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            script.model_name_or_path or folder,
            dtype=torch.float32,
            quantization_config=four_bit,
            device_map={"": "cpu"},
        )
    model.config.use_cache = False
    lora = LoraConfig(r=script.lora_r, lora_alpha=2 * script.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def run(script: ScriptArguments, training: Arguments, console: Console) -> None:
    """Train once, or twice to compare, show what was measured, and save the adapters."""
    ort_accel.load_config(training.ort_config)  # a wrong file is refused before anything runs
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer_name or str(minilm()))
    train, held_out = clm.blocks(script, tokenizer)
    console.print(f"{len(train)} blocks of text to train on, {len(held_out)} others held out.")

    def build(kind: type[Trainer]) -> Trainer:
        set_seed(training.seed)
        return kind(
            model=quantized(script, tokenizer),
            args=training,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )

    train_and_show(build, ORTTrainer, Trainer if script.compare_eager else None, console).save_model()


def main() -> int:
    """Read the arguments, then train."""
    script, training = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    return exit_code(lambda: run(script, training, Console()))


if __name__ == "__main__":
    sys.exit(main())
