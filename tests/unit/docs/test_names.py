"""Names that users were promised are in the schema, the JSON or the commands."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import typer.main

from steadytrain.components.plan.design import schema
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import describe, leaves
from steadytrain.components.shared.events.types import CLIPPED_SHARE, CLIPPED_STEPS, Event
from steadytrain.components.sizing.hardware import priced_by
from steadytrain.components.train.loop.job_status import TrainerStatus
from steadytrain.pipelines.cli import app

from support.snippets import ROOT

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
    "plan": ("--budget-usd", "--json", "--write", "--provider", "--prices", "--tokens-per-second"),
}
FIELDS = (
    *("compute.budget_usd", "compute.nccl", "compute.prefer", "training.goal"),
    *("training.lr_scaling", "training.base_global_batch_size", "training.save_strategy"),
    *("training.monitor.histograms", "training.attention", "training.loader_workers"),
    *("training.prefetch_batches", "model.adapter.quantization", "training.mixture.exhausted"),
    "recovery.min_sequence_length",
)
VALUES = {
    "training.goal": ("fastest", "best", "balanced"),
    "training.lr_scaling": ("none", "linear", "sqrt"),
    "training.save_strategy": ("steps", "epoch", "best", "time"),
    "training.attention": (
        *("auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex", "eager"),
    ),
    "training.mixture.by": ("weight", "temperature", "tokens"),
    "compute.prefer": ("native", "deepspeed"),
    "compute.offload": ("disk",),
    "model.adapter.quantization": ("nf4", "fp4", "int8"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_a_design_have_their_fields(name):
    found = schema()
    kind = found["properties"][name]["$ref"].rpartition("/")[2]
    assert set(OBJECTS[name]) <= set(found["$defs"][kind]["required"])
    assert set(OBJECTS[name]) <= set(found["$defs"][kind]["properties"])


@pytest.mark.parametrize("command", OPTIONS)
def test_commands_have_their_options(command):
    params = typer.main.get_command(app).commands[command].params
    assert set(OPTIONS[command]) <= {option for item in params for option in item.opts}


@pytest.mark.parametrize("field", FIELDS)
def test_configuration_has_the_fields(field):
    assert field in {item.name for item in leaves(RunConfig)}


@pytest.mark.parametrize("field", VALUES)
def test_fields_take_their_values(field):
    assert set(VALUES[field]) <= set(describe(field).kind.split(" | "))


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure", "lambda", "runpod", "modal"])
def test_each_provider_has_prices_with_a_date(provider):
    prices = priced_by(provider)
    assert any(gpu.usd_per_hour for gpu in prices.gpus)
    assert re.search(rf"{provider}'s list prices .* checked \d{{4}}-\d\d-\d\d", prices.origin)


def test_clipped_steps_are_an_event_with_a_stated_share():
    kind = next(one for one in Event.__subclasses__() if one.name == "gradient_overflow")
    assert {"clipped", "steps"} <= {item.name for item in fields(kind)}
    assert (CLIPPED_SHARE, CLIPPED_STEPS) == (0.5, 100)
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    assert "`training.max_grad_norm` clips more than half of 100 steps" in page


def test_progress_has_the_names_of_kubernetes():
    assert {"progressPercentage", "metrics"} <= set(TrainerStatus(finished=True).as_data())
