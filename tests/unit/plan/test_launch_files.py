"""The launch files of a plan are read by the tools that they are for."""

from __future__ import annotations

import json

import pytest
import yaml

from steadytrain.components.plan.plan import plan_training
from steadytrain.components.plan.render import texts
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage.local import write_texts
from steadytrain.components.sizing.hardware import this_cpu
from steadytrain.components.train.transformers_script import ARGUMENTS, SCRIPT

from support.plugins import write_plugin

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
    write_texts(tmp_path / "plan", texts(plan), "--write")
    return plan, tmp_path / "plan"


def test_written_configuration_gives_the_same_plan(written):
    plan, folder = written
    config = load(folder / "steadytrain.yaml")
    gpu = plan.job.machine.gpu
    again = plan_training(config, [gpu], gpu)
    assert again.works
    assert (again.choice.option, again.choice.batch) == (plan.choice.option, plan.choice.batch)
    assert again.choice.memory == plan.choice.memory
    assert all(decision.yours for decision in again.decisions if decision.value is not None)
    assert config.compute.device == "cuda"


def test_mig_device_is_requested_by_its_own_resource(make_plan, tmp_path):
    tiny = "hub:HuggingFaceTB/SmolLM2-135M"
    plan = make_plan("a100-80-mig-1g.10gb", model__base=tiny)
    assert (plan.offer.capacity_gb, plan.offer.usd, plan.scaling) == (10, None, [])
    write_texts(tmp_path, texts(plan), "--write")
    job = list(yaml.safe_load_all((tmp_path / "trainjob.yaml").read_text()))[-1]
    limits = job["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert limits["nvidia.com/mig-1g.10gb"] == "1"
    assert "nvidia.com/gpu" not in limits
    with pytest.raises(BadInput, match="process sees one MIG device"):
        make_plan("a100-80-mig-1g.10gb", 2, model__base=tiny)


def test_accelerate_reads_its_file(written):
    from accelerate.commands.config.config_args import load_config_from_file

    plan, folder = written
    found = load_config_from_file(str(folder / "accelerate.yaml"))
    assert found.num_processes == plan.job.machine.ranks
    assert found.mixed_precision == "bf16"
    kinds = {"single": "NO", "fsdp": "FSDP", "zero3": "DEEPSPEED"}
    assert found.distributed_type == kinds[plan.choice.option.strategy]


def test_deepspeed_reads_its_file(written, monkeypatch):
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


FOREIGN = """
from dataclasses import replace
from steadytrain.components.train.strategy.specs import {}
Plugin = replace({}, title="foreign")
"""


@pytest.mark.parametrize("name", ["DDP", "FSDP", "ZERO_2", "ZERO_3"])
def test_strategy_of_another_package_is_planned_by_its_spec(make_plan, tmp_path, monkeypatch, name):
    own, foreign = name.lower().replace("_", ""), f"foreign_{name.lower()}"
    site = write_plugin(tmp_path / "site", plugins.STRATEGIES, foreign, FOREIGN.format(name, name))
    monkeypatch.syspath_prepend(site)
    written, memory = [], []
    for strategy in (own, foreign):
        plan = make_plan(
            "a100-80", 8, 1, model__base="hub:Qwen/Qwen3-1.7B", compute__strategy=strategy
        )
        write_texts(folder := tmp_path / strategy, texts(plan), "--write")
        memory.append(plan.choice.memory)
        names = {"accelerate.yaml", "deepspeed.json"}
        written.append(
            {path.name: path.read_text() for path in folder.iterdir() if path.name in names}
        )
    assert memory[0] == memory[1]
    assert written[0] == written[1]
    assert written[0].keys() >= {"accelerate.yaml"}


@pytest.mark.slow
def test_what_accelerate_does_not_have_is_not_written_for_it(make_plan, tmp_path, monkeypatch):
    text = FOREIGN.format("DDP", "DDP").replace("title=", "accelerate='', title=")
    site = write_plugin(tmp_path / "site", plugins.STRATEGIES, "foreign_other", text)
    monkeypatch.syspath_prepend(site)
    plan = make_plan(
        "a100-80", 8, 1, model__base="hub:Qwen/Qwen3-1.7B", compute__strategy="foreign_other"
    )
    assert texts(plan).keys() == {"steadytrain.yaml", "trainjob.yaml", ARGUMENTS, SCRIPT}


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_is_not_to_start_several_ranks_on_a_cpu(configure, ranks):
    small = "hub:HuggingFaceTB/SmolLM2-135M"
    config = configure(compute__device="cpu", compute__nproc_per_node=ranks, model__base=small)
    cpu = this_cpu(config)
    written = texts(plan_training(config, [cpu], cpu))
    assert ("accelerate.yaml" in written) == (ranks == 1)


def test_trainjob_asks_for_the_plans_gpus(written):
    plan, folder = written
    runtime, job = yaml.safe_load_all((folder / "trainjob.yaml").read_text())
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    trainer, machine = job["spec"]["trainer"], plan.job.machine
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (machine.nodes, machine.per_node)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(machine.per_node)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
