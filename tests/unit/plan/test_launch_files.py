"""The launch files of a plan are read by the tools that they are for."""

from __future__ import annotations

import json

import pytest
import yaml

from steadytrain.components.plan.launch_files import write_files
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.shared.config import load
from steadytrain.components.sizing.hardware import all_gpus, find_gpu

CASES = {
    "single": ("h100", 1, 1, "3.1-8B"),
    "fsdp": ("a100-80", 8, 1, "3.1-8B"),
    "zero3": ("h100", 8, 2, "3.1-70B"),
}


@pytest.fixture(params=CASES)
def written(request, make_plan, tmp_path):
    gpu, per_node, nodes, model = CASES[request.param]
    plan = make_plan(gpu, per_node, nodes, model__base=f"hub:meta-llama/Llama-{model}")
    assert plan.choice.option.strategy == request.param
    write_files(plan, tmp_path / "plan")
    return plan, tmp_path / "plan"


def test_the_filled_in_configuration_is_the_same_plan(written):
    plan, folder = written
    config = load(folder / "steadytrain.yaml")
    again = plan_training(config, all_gpus(), find_gpu(plan.job.machine.gpu.name))
    assert again.works
    assert (again.choice.option, again.choice.batch) == (plan.choice.option, plan.choice.batch)
    assert again.choice.memory == plan.choice.memory
    assert all(decision.yours for decision in again.decisions if decision.value is not None)
    assert config.compute.device == "cuda"


def test_accelerate_reads_its_own(written):
    from accelerate.commands.config.config_args import load_config_from_file

    plan, folder = written
    found = load_config_from_file(str(folder / "accelerate.yaml"))
    assert found.num_processes == plan.job.machine.ranks
    assert found.mixed_precision == "bf16"
    kinds = {"single": "NO", "fsdp": "FSDP", "zero3": "DEEPSPEED"}
    assert found.distributed_type == kinds[plan.choice.option.strategy]


def test_deepspeed_reads_its_own(written, monkeypatch):
    plan, folder = written
    path = folder / "deepspeed.json"
    assert path.exists() == (plan.choice.option.strategy == "zero3")
    if not path.exists():
        return
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(json.loads(path.read_text()))
    assert found.zero_optimization_stage == 3
    assert found.zero_config.offload_optimizer.device == "cpu"
    assert found.gradient_accumulation_steps == plan.choice.batch.gradient_accumulation_steps


def test_the_trainjob_asks_for_the_plans_gpus(written):
    plan, folder = written
    runtime, job = yaml.safe_load_all((folder / "trainjob.yaml").read_text())
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    trainer, machine = job["spec"]["trainer"], plan.job.machine
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (machine.nodes, machine.per_node)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(machine.per_node)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
