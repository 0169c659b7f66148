"""The configuration files of accelerate that `ort-accel init` writes, by the kind of machine."""

from __future__ import annotations

from enum import StrEnum


class Machine(StrEnum):
    """The device that trains, and the way in which several processes share the work."""

    SINGLE_CPU = "single-cpu"
    SINGLE_GPU = "single-gpu"
    DDP = "ddp"
    DEEPSPEED_ZERO2 = "deepspeed-zero2"
    DEEPSPEED_ZERO3 = "deepspeed-zero3"
    FSDP2 = "fsdp2"

    @property
    def is_single(self) -> bool:
        """True if one process trains alone."""
        return self in {Machine.SINGLE_CPU, Machine.SINGLE_GPU}


_OF_MACHINE: dict[Machine, dict[str, object]] = {
    Machine.SINGLE_CPU: {"distributed_type": "NO", "use_cpu": True},
    Machine.SINGLE_GPU: {"distributed_type": "NO", "use_cpu": False, "gpu_ids": "all"},
    Machine.DDP: {"distributed_type": "MULTI_CPU", "use_cpu": True},
    Machine.DEEPSPEED_ZERO2: {
        "distributed_type": "DEEPSPEED",
        "use_cpu": False,
        "deepspeed_config": {
            "zero_stage": 2,
            "gradient_accumulation_steps": 1,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
        },
    },
    Machine.DEEPSPEED_ZERO3: {
        "distributed_type": "DEEPSPEED",
        "use_cpu": False,
        "deepspeed_config": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 1,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero3_save_16bit_model": True,
        },
    },
    Machine.FSDP2: {
        "distributed_type": "FSDP",
        "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
        },
    },
}


def accelerate_config(machine: Machine, processes: int, mixed_precision: str) -> dict[str, object]:
    """Returns the keys of accelerate for a machine."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        **_OF_MACHINE[machine],
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": processes,
        "mixed_precision": mixed_precision,
        "main_training_function": "main",
        "debug": False,
    }
