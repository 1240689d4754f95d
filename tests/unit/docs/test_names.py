"""Names that users were promised are in the schema, the JSON or the commands."""

from __future__ import annotations

import pytest
import typer.main

from steadytrain.components.plan.design import schema
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import leaves
from steadytrain.pipelines.cli import app

OBJECTS = {
    "pipeline_config": ("orchestrator", "steps", "triggers"),
    "distributed_config": ("strategy", "world_size", "backend"),
    "cost_estimate": ("hourly_cost_usd", "estimated_duration_hours", "total_cost_usd"),
}
OPTIONS = {
    "design": (
        *("--task", "--framework", "--data", "--gpu-type", "--gpu-count", "--memory-gb"),
        *("--storage-gb", "--budget-usd", "--tokens-per-second", "--json", "--write"),
    ),
    "doctor": ("--distributed", "--cluster", "--nodes"),
    "init": (
        *("--gpu-type", "--gpu-count", "--gpu-memory-gb", "--goal"),
        *("--cores", "--host-memory-gb"),
    ),
    "adjust": ("--set",),
    "check": ("--json",),
    "serve": ("--port",),
    "plan": ("--json", "--write", "--provider", "--prices", "--tokens-per-second"),
}
FIELDS = (
    *("compute.budget_usd", "compute.nccl", "compute.prefer", "training.goal"),
    *("training.lr_scaling", "training.base_global_batch_size", "training.save_strategy"),
    *("training.monitor.histograms", "training.attention", "training.loader_workers"),
    *("training.prefetch_batches", "model.adapter.quantization", "training.mixture.exhausted"),
    "recovery.min_sequence_length",
)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_a_design_have_their_fields(name):
    found = schema()
    kind = found["properties"][name]["$ref"].rpartition("/")[2]
    assert set(OBJECTS[name]) <= set(found["$defs"][kind]["required"]) | {"orchestrator"}
    assert set(OBJECTS[name]) <= set(found["$defs"][kind]["properties"])


@pytest.mark.parametrize("command", OPTIONS)
def test_commands_have_their_options(command):
    params = typer.main.get_command(app).commands[command].params
    assert set(OPTIONS[command]) <= {option for item in params for option in item.opts}


@pytest.mark.parametrize("field", FIELDS)
def test_configuration_has_the_fields(field):
    assert field in {item.name for item in leaves(RunConfig)}
