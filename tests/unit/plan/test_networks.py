"""Plans of networks that learn from images: their memory is that of real steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from steadytrain.components.images.training import ImageClassification
from steadytrain.components.memory.random_model import LiveTensors
from steadytrain.components.plan import prepared_sample
from steadytrain.components.plan.networks import Trial
from steadytrain.components.plan.prepared_sample import KnownData
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import find_gpu, this_cpu
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.questionnaire import Answers, Questionnaire
from steadytrain.pipelines.sources import Selection

from support.designed import follows_the_schema
from support.pictures import digits, image_config, prepared, write_folders
from support.planning import plan_of

MODELS = {
    "vit": "{model_type: vit, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, "
    "num_attention_heads: 2, patch_size: 4}",
    "convnext": "{model_type: convnext, patch_size: 2, num_stages: 2, hidden_sizes: [16, 32], "
    "depths: [1, 2]}",
    "resnet": "{model_type: resnet, embedding_size: 16, hidden_sizes: [32, 64], depths: [1, 1]}",
    "timm resnet": "{model_type: timm_wrapper, architecture: resnet10t}",
    "timm vit": "{model_type: timm_wrapper, architecture: vit_tiny_patch16_224, "
    "model_args: {patch_size: 4, embed_dim: 64, depth: 3, num_heads: 2}}",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder and the prepared data of 200 digits of 32 pixels."""
    images, labels = (part[:200] for part in digits())
    source = write_folders(tmp_path_factory.mktemp("plan") / "images", images, labels)
    return source, prepared(source, "data.images.size=32")[1]


def configured(source, *overrides):
    return image_config(source, "data.images.size=32", *overrides)


def measured(config, data, records):
    """Return the most bytes of live tensors in the second of two real steps."""
    torch.manual_seed(0)
    live = LiveTensors(lambda *_: "all")
    with live:
        task = ImageClassification(config, data)
        model = task.build_model().train()
        for tensor in (*model.parameters(), *model.buffers()):
            live.see(tensor, "all")
        batch = Trial(config, KnownData(data)).batch(records)
        for tensor in batch.values():
            live.see(tensor, "all")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for _ in range(2):
            live.begin()
            task.compute_loss(model, batch).total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("records", [2, 16])
def test_memory_is_that_of_real_steps(made, kind, records):
    source, data = made
    config = configured(source, f"model.config={MODELS[kind]}")
    planned = Trial(config, KnownData(data)).peak(records, half=False).total
    real = measured(config, data, records)
    assert planned == pytest.approx(real, rel=0.01)


@pytest.mark.slow
def test_micro_batch_is_the_largest_that_fits(made):
    source, data = made
    config = configured(source, f"model.config={MODELS['vit']}", "training.global_batch_size=64")
    device = this_cpu(config)
    trial = Trial(config, KnownData(data))
    whole = trial.on(device)
    assert whole.works
    assert (whole.micro_batch, whole.accumulation) == (64, 1)
    less = (whole.memory * 0.7 / 0.95) / 1e9
    half = trial.on(device.model_copy(update={"memory_gb": less}))
    assert half.works
    assert half.micro_batch * half.accumulation == 64
    assert half.micro_batch < 64
    none = trial.on(device.model_copy(update={"memory_gb": 1e-3}))
    assert not none.works
    assert none.micro_batch == 1
    assert any("does not fit" in line for line in none.lines())


def test_flops_are_those_of_the_matrices(made):
    source, data = made
    config = configured(source, f"model.config={MODELS['vit']}")
    found = Trial(config, KnownData(data)).peak(8, half=False).flops / 8
    tokens, width, hidden = 65, 64, 128
    layer = 2 * tokens * (4 * width * width + 2 * width * hidden) + 4 * tokens**2 * width
    patches, head = 2 * 64 * 16 * width, 2 * width * 10
    # Attention recomputes its products in the backward pass; pixels get no gradient.
    assert found == pytest.approx(3 * (3 * layer + head) + 2 * patches, rel=0.1)


@pytest.mark.slow
def test_plan_before_the_preprocess_step_is_that_after_it(made, tmp_path):
    source, data = made
    config = configured(source, f"output={tmp_path}", "run=new")
    found = plan_of(config, find_gpu("t4"))
    after = Trial(config, KnownData(data)).on(find_gpu("t4"), "list")
    assert found.rows == data.sides["train"].rows
    assert replace(found, rows_from=after.rows_from) == after
    assert "all records, prepared for this plan" in "\n".join(found.lines())
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_rows_of_a_sample_scale_with_the_size_of_all_data(made, tmp_path):
    source, data = made
    config = configured(source, f"output={tmp_path}", "run=new")
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    found = plan_of(config, find_gpu("t4"), data_bytes=1000 * size)
    assert found.rows == 1000 * data.sides["train"].rows
    assert "200 records, prepared for this plan and scaled to" in found.rows_from


@pytest.mark.slow
def test_plan_prepares_a_part_of_many_images(made, tmp_path, monkeypatch):
    source, data = made
    config = configured(source, f"output={tmp_path}", "run=new")
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    monkeypatch.setattr(prepared_sample, "_MOST", size * 2 // 3)
    monkeypatch.setattr(prepared_sample, "_FEWEST", 100)
    found = plan_of(config, find_gpu("t4"))
    assert "100 records" in found.rows_from
    assert found.rows == pytest.approx(data.sides["train"].rows, rel=0.1)
    monkeypatch.setattr(prepared_sample, "_FEWEST", 101)
    with pytest.raises(BadInput, match="a plan prepares") as caught:
        plan_of(config, find_gpu("t4"))
    assert "steadytrain step preprocess" in caught.value.remedy


def test_plan_of_images_elsewhere_says_what_to_do(tmp_path):
    config = configured(tmp_path, "data.source=hub:someone/photos", f"output={tmp_path}")
    with pytest.raises(BadInput, match="they are not on this machine") as caught:
        plan_of(config, find_gpu("h100"))
    assert "--data-gb" in caught.value.remedy


@pytest.mark.slow
def test_init_shows_what_gpus_change_in_the_plan_of_prepared_images(made):
    source, _ = made

    def choose(overrides):
        given = [f"{name}={value}" for name, value in overrides]
        return Selection(configured(source, *given), ())

    questions = Questionnaire(choose, ())
    questions.take_each(Answers(gpu="t4", count=2))
    first, second = questions.changes
    assert first.fields["compute.device"] == ("auto", "cuda")
    assert first.after == second.before
    planned = plan_of(questions.selection.config, find_gpu("t4"))
    for part in ("device 2 x T4", f"batch {planned.micro_batch} x 1", "USD"):
        assert part in second.after
    assert "device 1 x T4" in first.after
    with pytest.raises(BadInput, match="--goal: a plan for image_classification"):
        questions.take_each(Answers(goal="best"))


@pytest.mark.slow
def test_init_prepares_images_once_for_all_answers(made, tmp_path, monkeypatch):
    source, _ = made
    folders, prepare = [], prepared_sample.build

    def build(config, encoder, model, inputs, folder, stage):
        folders.append(folder)
        return prepare(config, encoder, model, inputs, folder, stage)

    monkeypatch.setattr(prepared_sample, "build", build)

    def choose(overrides):
        given = [f"{name}={value}" for name, value in overrides]
        return Selection(configured(source, f"output={tmp_path}", "run=new", *given), ())

    with Questionnaire(choose, ()) as questions:
        questions.take_each(Answers(gpu="t4", count=2, memory_gb=16))
        (folder,) = folders
        assert folder.is_dir()
    assert not folder.exists()
    for change, devices in zip(questions.changes, (1, 1, 2), strict=True):
        assert f"device {devices} x T4" in change.after


@pytest.mark.slow
def test_command_shows_the_plan_and_times_real_steps(made):
    source, _ = made
    fields = [
        f"data.source=[{source}]",
        f"output={source.parent / 'output'}",
        "run=images",
        "data.images.size=32",
        "compute.device=cpu",
        f"model.config={MODELS['vit']}",
    ]
    sets = [part for field in fields for part in ("--set", field)]
    done = CliRunner().invoke(app, ["plan", "images", *sets, "--calibrate", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["works"]
    assert found["speed_from"] == "4 steps on this machine"
    assert 0 < found["hours"]["low"] <= found["hours"]["high"]
    parts = follows_the_schema(found)
    middle = (found["hours"]["low"] * found["hours"]["high"]) ** 0.5
    assert parts["cost_estimate"]["estimated_duration_hours"] == pytest.approx(middle)
    assert parts["distributed_config"]["backend"] == "gloo"
    words = ["plan", "images", *sets, "--gpu", "a100", "--gpus-per-node", "2", "--json"]
    paid = json.loads(CliRunner().invoke(app, words).stdout)
    parts = follows_the_schema(paid)
    assert parts["cost_estimate"]["hourly_cost_usd"] == 2 * find_gpu("a100").usd_per_hour
    assert "own table" in parts["cost_estimate"]["prices"]
    assert (parts["distributed_config"]["strategy"], paid["ranks"]) == ("data_parallel", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("vit", (), ["training.attention auto: it computes by sdpa, as"]),
        ("vit", ("training.attention=eager",), ["training.attention eager: it computes by eager"]),
        ("resnet", (), []),
    ],
)
def test_plan_says_how_attention_is_computed(made, kind, fields, said):
    source, data = made
    config = configured(source, f"model.config={MODELS[kind]}", *fields)
    remarks = plan_of(config, find_gpu("t4"), known=lambda: KnownData(data)).remarks
    found = [remark for remark in remarks if "attention" in remark]
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said)), found
