"""A plan whose speed is measured with real steps of a tiny model on a CPU, and what it rejects."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from steadytrain.components.plan import calibration
from steadytrain.components.plan.calibration import STEPS, calibrate, row_lengths
from steadytrain.components.plan.plan import plan_training
from steadytrain.components.plan.render import accelerate_config, filled, render
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.hardware import find_gpu, this_cpu
from steadytrain.components.sizing.machine import Machine
from steadytrain.components.sizing.time_cost import THE_TABLE, Span, Speed, of_all_ranks
from steadytrain.components.techniques.order import RowOrder
from steadytrain.pipelines.cli import app

from support.scoring import fresh
from support.training import GPT2, LLAMA, class_rows, language_rows, write_data

BERT = {**LLAMA, "model_type": "bert"}
TABLE = [find_gpu("t4"), find_gpu("h100")]
"""Two types to compare with: a plan for each takes a tenth of a second."""
TINY = {
    "data__sequence_length": 32,
    "training__global_batch_size": 4,
    "training__max_steps": 100,
    "compute__device": "cpu",
    "compute__threads_per_rank": 1,
    "compute__price_per_hour": 3.0,
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Time all steps with all rows, on a machine that is busy, too."""
    monkeypatch.setattr(calibration, "SECONDS", 3600.0)


@pytest.fixture
def tiny(configure, tmp_path):
    """Return the configuration of a tiny model. With `base`, its base folder has no weights."""

    def make(architecture=LLAMA, *, base=False, **fields):
        content = {"vocab_size": 64, **architecture}
        model = {"config": content}
        if base:
            (tmp_path / "config.json").write_text(json.dumps(content))
            model = {"base": str(tmp_path)}
        return configure(**{**TINY, "model": model, **fields})

    return make


@pytest.fixture
def plan_here():
    """Return a calibrated plan for this machine's CPU.

    accelerate's precision is global to the process, so its state is reset.
    """
    threads = torch.get_num_threads()

    fresh()

    def make(config):
        fresh()
        told = []
        timed = partial(calibrate, notify=told.append)
        return plan_training(config, TABLE, this_cpu(config), timed=timed), told

    yield make
    fresh()
    torch.set_num_threads(threads)


def test_hours_and_cost_follow_the_measured_speed(plan_here, tiny):
    plan, told = plan_here(tiny())
    offer, speed = plan.offer, plan.offer.tokens_per_second
    assert 0 < speed.low <= speed.high
    assert offer.hours is not None
    assert offer.hours.low == pytest.approx(100 * 4 * 32 / speed.high / 3600)
    assert offer.hours.high == pytest.approx(100 * 4 * 32 / speed.low / 3600)
    assert offer.usd is not None
    assert offer.usd.high == pytest.approx(3 * offer.hours.high)
    assert offer.timed_by == f"{STEPS} steps on this machine"
    assert {other.timed_by for other in plan.offers} == {THE_TABLE}
    assert plan.as_data()["offer"]["timed_by"] == offer.timed_by
    assert f": {offer.timed_by}\n" in render(plan)
    assert "nothing was run" not in render(plan)
    assert [line for line in told if " of 4, " in line] == told[-STEPS:]


def test_cpu_plan_is_for_this_machine_without_a_gpu(plan_here, tiny):
    plan, _ = plan_here(tiny(training__bf16=False))
    assert plan.works
    assert str(plan.job.machine).startswith("1 x CPU (")
    assert plan.choice.setting.precision == "fp32"
    assert not plan.choice.memory.context
    assert not plan.remarks
    assert filled(plan).compute.device == "cpu"
    assert accelerate_config(plan)["use_cpu"] is True


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\nflags\t\t: fpu avx512_bf16", "bf16"),
        ("flags : fpu amx_bf16 amx_tile", "bf16"),
        ("Features\t: fp asimd bf16 i8mm", "bf16"),
        ("flags : fpu avx512f", "fp32"),
        ("flags : fpu avx512_bf16\nflags : fpu avx2", "fp32"),
        ("model name : none", "fp32"),
    ],
)
def test_cpu_plan_uses_bfloat16_if_the_cpu_has_instructions_for_it(
    plan_here, tiny, tmp_path, monkeypatch, flags, precision
):
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr("steadytrain.components.sizing.hardware._CPUINFO", tmp_path / "cpuinfo")
    plan, _ = plan_here(tiny())
    assert plan.works
    assert plan.choice.setting.precision == precision
    [decision] = [item for item in plan.decisions if item.field == "training.bf16"]
    assert decision.value is (precision == "bf16")
    asked, _ = plan_here(tiny(training__bf16=True))
    assert asked.works
    assert asked.choice.setting.precision == "bf16"


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        (LLAMA, {"base": True, "model__adapter__kind": "lora", "training__bf16": True}),
        (GPT2, {"training__gradient_checkpointing": True, "training__micro_batch_size": 1}),
        (BERT, {"data__task": "sequence_classification"}),
        (LLAMA, {"compute__nproc_per_node": 2, "compute__strategy": "fsdp"}),
    ],
)
def test_other_training_options_are_timed(plan_here, tiny, architecture, fields):
    plan, _ = plan_here(tiny(architecture, **fields))
    assert plan.offer.tokens_per_second.low > 0
    ranks = plan.job.machine.ranks
    assert (
        "of one rank on this machine; communication between 2 ranks" in plan.offer.timed_by
    ) is (ranks > 1)


def test_at_least_one_step_is_timed(plan_here, tiny, monkeypatch):
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    plan, told = plan_here(tiny())
    assert plan.offer.timed_by == "1 step on this machine (1 of 4 sequences each)"
    assert "step 1 of 4" in told[-1]
    speed = plan.offer.tokens_per_second
    assert speed.low == speed.high


def test_speed_scales_with_ranks_minus_waiting_at_the_low_end():
    gpu = find_gpu("h100")
    assert of_all_ranks(Span(10, 20), Machine(gpu)) == Span(10, 20)
    assert of_all_ranks(Span(10, 20), Machine(gpu, 1, 2)) == Span(18, 40)
    assert of_all_ranks(Span(10, 20), Machine(gpu, 2, 2)) == Span(32, 80)


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_timed_rows_have_the_lengths_of_the_prepared_ones(tiny, tmp_path, task):
    config = tiny(data__task=task)
    assert row_lengths(config, 3) == [32, 32, 32]
    make = language_rows if task == "causal_lm" else class_rows
    train, held_out = make(20), make(5, seed=1)
    write_data(tmp_path / "data", train, held_out, task=task).save(
        Workspace.of(config).record("preprocess")
    )
    lengths = np.array([len(row["input_ids"]) for row in train], dtype=np.int32)
    padded = lengths if task == "sequence_classification" else None
    training = config.training
    order = RowOrder(20, training.seed, padded, training.global_batch_size).take(0, 30)
    assert row_lengths(config, 30) == lengths[order].tolist()


@pytest.mark.parametrize(
    ("gpu", "fields", "message"),
    [
        ("l4", {"model__adapter__kind": "qlora"}, "kind = 'qlora': weights are quantized"),
        (
            "h100",
            {"compute__strategy": "fsdp", "compute__offload": "all"},
            "compute.offload = 'all'",
        ),
        ("h100", {"training__r_drop": {"weight": 1.0}}, "training.r_drop: --calibrate times steps"),
        ("h100", {"data__task": "support.faults:Slow"}, "data.task = 'support.faults:Slow'"),
        (
            "h100",
            {"model__base": "hub:gpt2", "data__sequence_length": 2048},
            "data.sequence_length = 2048: the model takes at most 1024 tokens",
        ),
    ],
)
def test_settings_that_one_device_cannot_time_are_rejected(configure, gpu, fields, message):
    timed = partial(calibrate, notify=print)
    with pytest.raises(BadInput, match=message) as error:
        plan_training(configure(**fields), TABLE, find_gpu(gpu), timed=timed)
    assert "leave --calibrate out" in error.value.remedy


def test_model_larger_than_free_memory_is_rejected_before_building(plan_here, configure):
    config = configure(
        model__base="hub:meta-llama/Llama-3.1-70B",
        model__adapter__kind="none",
        compute__device="cpu",
    )
    with pytest.raises(BadInput, match=r"needs [\d.]+ GB by the formula, and [\d.]+ GB are free"):
        plan_here(config)


def test_cpu_plan_uses_nothing_that_needs_cuda(configure):
    with pytest.raises(BadInput, match="paged_adamw_8bit': that needs a CUDA device"):
        this_cpu(configure(training__optim="paged_adamw_8bit"))
    config = configure()
    small = this_cpu(config).model_copy(update={"memory_gb": 6.0})
    timed = lambda job, choice: Speed(Span(1, 2), "nobody")  # noqa: E731
    plan = plan_training(config, TABLE, small, timed=timed)
    assert not plan.works
    assert (plan.choice.option.adapter, plan.choice.option.optim) == ("qlora", "adamw_torch")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_command_times_this_machine_and_shows_it_next_to_the_plan(no_gpu, plan_here, tmp_path):
    path = tmp_path / "tiny.yaml"
    model = {"config": {**LLAMA, "vocab_size": 64}}
    path.write_text(
        json.dumps(
            {
                "name": "tiny",
                "output": str(tmp_path),
                "data": {"task": "causal_lm", "source": ["none"], "sequence_length": 32},
                "model": model,
                "training": {"max_steps": 10},
                "compute": {"threads_per_rank": 1},
            }
        )
    )
    done = CliRunner().invoke(app, ["plan", str(path), "--calibrate", "--json"])
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["offer"]["timed_by"] == f"{STEPS} steps on this machine"
    assert told["hardware"]["gpu"] == "CPU"
    assert "calibrating: step 4 of 4" in done.stderr


def test_absent_gpu_cannot_be_timed(no_gpu):
    done = CliRunner().invoke(app, ["plan", "causal-lm", "--gpu", "h100", "--calibrate"])
    assert isinstance(done.exception, BadInput)
    assert "--gpu H100: the GPU that --calibrate can time here is a CPU" in str(done.exception)
