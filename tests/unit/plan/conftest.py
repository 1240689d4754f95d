"""Plans of small configurations, by the product's own table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.train.plan.hardware import all_gpus, find_gpu
from steadytrain.components.train.plan.hosts import Hosts
from steadytrain.components.train.plan.plan import Plan, plan_training

CONFIGURATION = """
name: plan
data: {task: supervised_finetuning, source: [chat.jsonl], sequence_length: 1024}
model: {base: hub:meta-llama/Llama-3.1-8B}
training: {max_steps: 1000}
"""
MakePlan = Callable[..., Plan]


@pytest.fixture
def configure(tmp_path) -> Callable[..., RunConfig]:
    """The configuration with other values, below a folder where nothing is prepared."""

    def make(**fields: Any) -> RunConfig:
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return load(CONFIGURATION, {"output": str(tmp_path), **named})

    return make


@pytest.fixture
def make_plan(configure) -> MakePlan:
    """A plan for so many GPUs; without a kind the plan chooses one."""

    def make(
        gpu: str = "",
        per_node: int = 1,
        nodes: int = 1,
        hosts: Hosts | None = None,
        **fields: Any,
    ) -> Plan:
        sizes = {"compute.nodes": nodes, "compute.nproc_per_node": per_node}
        config = configure(**sizes, **fields)
        return plan_training(config, all_gpus(), find_gpu(gpu) if gpu else None, hosts)

    return make
