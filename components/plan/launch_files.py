"""A plan as files: the completed configuration, and configurations for other launchers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from steadytrain.components.plan.plan import Plan
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.environment import TRAIN_IMAGE
from steadytrain.components.shared.storage.local import write_requested
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.job_kinds import TrainJob
from steadytrain.components.train.launch.naming import job_name, run_labels
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.components.train.launch.pods import agent_command
from steadytrain.components.train.launch.process import RANK_PROGRAM
from steadytrain.components.train.strategy.zero_config import zero_config


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Write the files, replacing existing ones.

    steadytrain.yaml: the configuration with all open fields filled in.
    accelerate.yaml: for `accelerate launch` with your own program, if it has such a strategy.
    deepspeed.json: if the strategy is one of DeepSpeed's.
    trainjob.yaml: the first attempt as steadytrain would submit it to Kubeflow Trainer.

    Raises:
        BadInput: a file can't be written.
    """
    config = filled(plan)
    texts = {
        "steadytrain.yaml": config.to_yaml(),
        "trainjob.yaml": yaml.safe_dump_all(trainjob(config), sort_keys=False),
    }
    if plan.choice.setting.sharing.accelerate:
        texts["accelerate.yaml"] = yaml.safe_dump(accelerate_config(plan), sort_keys=False)
    if plan.choice.setting.deepspeed:
        texts["deepspeed.json"] = json.dumps(deepspeed_config(plan), indent=2)
    for name, text in texts.items():
        write_requested(folder / name, text.encode(), "--write")
    return [folder / name for name in texts]


def filled(plan: Plan) -> RunConfig:
    """Return the configuration with every decision of the plan."""
    content = plan.job.config.model_dump()
    for decision in plan.decisions:
        *sections, field = decision.field.split(".")
        place = content
        for section in sections:
            place = place[section]
        if decision.value is not None:
            place[field] = decision.value
    content["compute"]["nodes"] = plan.job.machine.nodes
    content["compute"]["nproc_per_node"] = plan.job.machine.per_node
    if content["compute"]["device"] == "auto":
        content["compute"]["device"] = "cuda" if plan.job.machine.gpu.cuda else "cpu"
    return RunConfig.model_validate(content)


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Return the configuration that `accelerate config` would write."""
    setting, machine = plan.choice.setting, plan.job.machine
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": setting.sharing.accelerate.replace("GPU", machine.gpu.kind),
        "mixed_precision": {"fp32": "no"}.get(setting.precision, setting.precision),
        "num_machines": machine.nodes,
        "num_processes": machine.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not machine.gpu.cuda,
    }
    if setting.deepspeed:
        content["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": False,
        }
    if setting.sharing.accelerate == "FSDP":
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": setting.offload == "all",
            "fsdp_activation_checkpointing": setting.recompute,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return content


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the strategy's configuration, with its micro-batch and accumulation."""
    setting, batch = plan.choice.setting, plan.choice.batch
    made = zero_config(
        stage=setting.sharing.zero_stage,
        limit=plan.job.config.training.max_grad_norm or math.inf,
        bf16=setting.precision == "bf16",
        offload=setting.offload,
        parameters=plan.job.shape.parameters,
        trained=plan.trained,
    )
    return made | {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }


def trainjob(config: RunConfig) -> list[Mapping[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a run's first attempt."""
    folder = Workspace.of(config).attempts / "0001"
    job = TrainJob(
        name=job_name(config.run_id, 1),
        folder=str(folder),
        labels=run_labels(config.run_id),
        command=agent_command(
            config.compute, folder, ("python", *RANK_PROGRAM[1:]), python="python"
        ),
        compute=config.compute,
        recovery=config.recovery,
        own=OwnPod(image=TRAIN_IMAGE),
    )
    return [manifest for _, manifest in job.manifests()]
