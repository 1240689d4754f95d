"""Predicted and measured memory and speed, side by side."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import AttemptStarted, TrainingStep
from steadytrain.pipelines.view.pages import predicted_and_measured
from steadytrain.pipelines.view.reader import FULL, RunReader, full

SHAPE = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 8000,
}  # fmt: skip


@pytest.fixture
def measured(make_run, source):
    """Return a function that trains on a device, and returns memory and speed."""

    def measure(device, *, peak=10**9, task="causal_lm"):
        run = make_run("first")
        changed = run.config.model.model_copy(update={"config": SHAPE})
        text = run.config.model_copy(update={"model": changed}).to_yaml()
        run.workspace.config.write_text(text.replace("task: causal_lm", f"task: {task}"))
        run.emit(
            "supervisor", AttemptStarted, attempt=1, world_size=1, batch=BatchSettings(8),
            gradient_accumulation_steps=1, device=device,
        )  # fmt: skip
        for step, speed in enumerate((10_000.0, 90_000.0, 100_000.0)):
            run.emit(
                "rank-0", TrainingStep, attempt=1, step=step, epoch=0.0, loss=1.0,
                learning_rate=0.1, grad_norm=1.0, tokens=step, tokens_per_second=speed,
                gpu_memory_used=peak // 2, gpu_memory_peak=peak, memory_used=1,
            )  # fmt: skip
        events = RunReader(source, "first", FULL).events(source.events("first"))
        return predicted_and_measured(full(source, "first", events))

    return measure


def test_known_gpu_has_a_prediction_beside_the_measurement(measured):
    memory, speed = measured("NVIDIA H100 80GB HBM3")
    assert (memory.measured, speed.measured) == ("1 GB", "90k")
    assert memory.predicted.endswith(("MB", "GB"))
    assert " to " in speed.predicted
    assert memory.difference[0] in "+-"
    assert speed.difference.endswith("%")


@pytest.mark.parametrize("device", ["cpu", "", "a GPU of next year"])
def test_unknown_device_has_only_the_measurement(measured, device):
    memory, speed = measured(device, peak=0)
    assert (memory.predicted, speed.predicted, memory.measured) == ("", "", "")
    assert (speed.measured, speed.difference) == ("90k", "")


def test_module_that_a_configuration_names_is_not_imported(measured, tmp_path, monkeypatch):
    canary = tmp_path / "imported"
    (tmp_path / "hostile_task.py").write_text(f"open({str(canary)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    memory, _ = measured("NVIDIA H100 80GB HBM3", task="hostile_task:TASK")
    assert memory.predicted == ""
    assert not canary.exists()
