"""Plans for small configurations, with the product's own table of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from steadytrain.components.plan.plan import Plan, plan_training
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.sizing.hardware import Gpu, all_gpus, find_gpu
from steadytrain.components.sizing.machine import Hosts

CONFIGURATION = """
name: plan
data: {task: supervised_finetuning, source: [chat.jsonl], sequence_length: 1024}
model: {base: hub:meta-llama/Llama-3.1-8B}
training: {max_steps: 1000}
"""
MakePlan = Callable[..., Plan]


@pytest.fixture
def configure(tmp_path) -> Callable[..., RunConfig]:
    """Return the configuration with other values, and an output folder without prepared data."""

    def make(**fields: Any) -> RunConfig:
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return load(CONFIGURATION, {"output": str(tmp_path), **named})

    return make


@pytest.fixture
def make_plan(configure) -> MakePlan:
    """Plan for this many GPUs. Without a GPU type, the plan chooses one.

    Only then does it compare the types of the whole table, which takes most of its time, unless a
    test gives it the `table`.
    """

    def make(
        gpu: str = "",
        per_node: int = 1,
        nodes: int = 1,
        hosts: Hosts | None = None,
        table: Sequence[Gpu] = (),
        **fields: Any,
    ) -> Plan:
        sizes = {"compute.nodes": nodes, "compute.nproc_per_node": per_node}
        config = configure(**sizes, **fields)
        given = find_gpu(gpu) if gpu else None
        return plan_training(config, table or ([given] if given else all_gpus()), given, hosts)

    return make
