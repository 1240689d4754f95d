"""The plan of a model of texts, images and columns: its memory is that of real steps."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from steadytrain.components.memory.random_model import LiveTensors
from steadytrain.components.multimodal.training import MultimodalClassification
from steadytrain.components.plan.networks import Trial
from steadytrain.components.plan.prepared_sample import KnownData
from steadytrain.pipelines.cli import app

from support.designed import follows_the_schema
from support.mixed import mixed_config


@pytest.mark.slow
def test_memory_is_that_of_real_steps(bench):
    made = bench()
    trial = Trial(made.config, KnownData(made.data))
    live = LiveTensors(lambda *_: "all")
    with live:
        task = MultimodalClassification(made.config, made.data)
        model = task.build_model().train()
        batch = trial.batch(8)
        # Without padding, Transformers needs no mask; the plan counts one.
        batch["attention_mask"][0, -1] = 0
        for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
            live.see(tensor, "all")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for _ in range(2):
            live.begin()
            task.compute_loss(model, batch).total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    planned = trial.peak(8, half=False).total
    assert planned == pytest.approx(live.peak, rel=0.01)
    assert batch["input_ids"].shape == (8, made.data.sequence_length)


@pytest.mark.slow
def test_three_objects_of_a_plan_follow_the_schema(prepared_mixed, tmp_path):
    config = mixed_config(prepared_mixed[0], "compute.price_per_hour=2")
    path = tmp_path / "mixed.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    done = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    parts = follows_the_schema(told)
    ranks, cost = parts["distributed_config"], parts["cost_estimate"]
    assert (ranks["strategy"], ranks["world_size"]) == ("none", 1)
    steps = [step["name"] for step in parts["pipeline_config"]["steps"]]
    assert {"preprocess", "train", "evaluate", "register"} <= {*steps}
    model = MultimodalClassification(config, prepared_mixed[1]).build_model()
    assert told["parameters"] == sum(weight.numel() for weight in model.parameters())
    hours = cost["estimated_duration_hours"]
    assert 0 < cost["duration_hours"]["low"] <= hours <= cost["duration_hours"]["high"]
    assert cost["total_cost_usd"] == pytest.approx(2 * hours, abs=0.01)
