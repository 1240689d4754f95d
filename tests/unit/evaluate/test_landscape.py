"""The loss landscape: directions by the paper's definition, known losses, weights that return."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from steadytrain.components.evaluate.landscape import (
    direction,
    losses_on_plane,
    mean_loss,
    measure_landscape,
    moving,
    rings,
    weights_of,
)
from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.evaluate.step import evaluation_page
from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.pages.evaluation_section import (
    crossings,
    evaluation_section,
    landscape_map,
    landscape_words,
)
from steadytrain.components.preprocess import step as preprocess
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.compatibility import conflicts
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import WorkProgress
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import EvaluationRecord, Interval, LandscapeRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask

from support.lm_tasks import judged_run
from support.selected import each
from support.tiny import make_language_model, make_tokenizer
from support.weight_digests import BERT, CHATML


class Small(torch.nn.Module):
    """One of each kind of parameter; the embedding and the head are tied."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(7, 4)
        self.linear = torch.nn.Linear(4, 5)
        self.turned = Conv1D(6, 4)
        self.image = torch.nn.Conv2d(2, 3, 2)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.linear.weight[2] = 0


def quiet(done):
    pass


def test_each_filter_of_a_direction_is_as_long_as_that_of_the_weights():
    weights = {weight.name: weight for weight in weights_of(Small())}
    assert list(weights) == ["embedding.weight", "linear.weight", "turned.weight", "image.weight"]
    for name, weight in weights.items():
        filters = 1 if name == "turned.weight" else 0
        found = direction(weight, 7, 0).numpy().astype(float)
        trained = weight.trained.numpy().astype(float)
        for index in range(trained.shape[filters]):
            of_trained = np.linalg.norm(trained.take(index, filters))
            assert np.linalg.norm(found.take(index, filters)) == pytest.approx(of_trained, rel=1e-5)


def test_directions_depend_on_seed_axis_and_name_alone():
    one, *_, last = weights_of(Small())
    first = direction(one, 7, 0)
    torch.manual_seed(5)
    assert direction(one, 7, 0).equal(first)
    drawn = [first, direction(one, 8, 0), direction(one, 7, 1)]
    shares = [
        abs(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)).item()
        for a, b in [(drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[1], drawn[2])]
    ]
    assert max(shares) < 0.6
    twin = type(last)("other", last.parameter, last.filters, last.trained)
    assert not direction(twin, 7, 0).equal(direction(last, 7, 0))


def test_quadratic_loss_has_the_landscape_that_algebra_gives():
    """Half the squared distance from a target is a quadratic in both steps, in closed form."""
    model = torch.nn.Linear(40, 30, bias=False)
    trained = model.weight.detach().double().numpy().copy()
    target = trained + np.random.default_rng(0).normal(size=trained.shape)

    def loss():
        return float(0.5 * ((model.weight.detach().double().numpy() - target) ** 2).sum())

    (weight,) = weights_of(model)
    one, other = (direction(weight, 3, axis).double().numpy() for axis in (0, 1))
    steps = [-1.0, -0.5, 0.0, 0.5, 1.0]
    found = np.array(losses_on_plane(model, loss, steps, 3, quiet))
    away = trained - target
    for row, second in enumerate(steps):
        for column, first in enumerate(steps):
            wanted = 0.5 * (
                (away**2).sum()
                + first**2 * (one**2).sum()
                + second**2 * (other**2).sum()
                + 2 * first * second * (one * other).sum()
                + 2 * first * (away * one).sum()
                + 2 * second * (away * other).sum()
            )
            assert found[row, column] == pytest.approx(wanted, rel=1e-6)
    # Filter by filter, each direction is as long as the weights.
    assert (one**2).sum() == pytest.approx((trained**2).sum(), rel=1e-6)


@pytest.mark.parametrize("broken", [False, True])
def test_weights_are_the_same_to_the_bit_afterwards(broken):
    model = Small()
    model.linear.bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def loss():
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        if broken and len(seen) == 2:
            raise KeyboardInterrupt
        return math.nan if len(seen) == 4 else 1e300 * len(seen)

    if broken:
        with pytest.raises(KeyboardInterrupt):
            losses_on_plane(model, loss, [-1, 0, 1], 0, quiet)
    else:
        found = losses_on_plane(model, loss, [-1, 0, 1], 0, quiet)
        assert found[1][0] is None
        profile = rings([-1, 0, 1], found)
        assert [ring.not_finite for ring in profile] == [0, 1]
        assert profile[1].mean == pytest.approx(1e300 * (45 - 5 - 4) / 7)
        # The point in the middle is the trained model.
        assert all(value.equal(before[name]) for name, value in seen[4].items())
    moved = {name for name, value in seen[0].items() if not value.equal(before[name])}
    assert moved == {
        *("embedding.weight", "head.weight"),
        *("linear.weight", "turned.weight", "image.weight"),
    }
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert after[name].view(torch.uint8).equal(value.view(torch.uint8)), name


def test_points_do_not_depend_on_those_before_them():
    model = Small()
    with moving(model, 1) as move:
        move(0.5, -0.5)
        first = model.linear.weight.detach().clone()
        move(100.0, 100.0)
        move(0.5, -0.5)
        assert model.linear.weight.equal(first)


LANGUAGE = (
    "causal_lm",
    "supervised_finetuning",
    "preference",
    "unpaired_preference",
    "denoising",
)
TASKS = (*LANGUAGE, "masked_lm", "text_embedding", "sequence_classification", "multi_task")
WORDS = ["import", "return", "class", "self", "item", "value", "first", "second", "third", "code"]


def prepared(folder, task, **sections):
    """Prepare data, and export an untrained model of a task; return the config and the parts."""
    tokenizer = make_tokenizer(60)
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens(
        {
            "mask_token": "<mask>",
            "pad_token": "<pad>",
            "extra_special_tokens": [f"<extra_id_{number}>" for number in range(20)],
        }
    )
    base = folder / "base"
    tokenizer.save_pretrained(base)
    make_language_model("llama", len(tokenizer), 128).save_pretrained(base)
    random = np.random.default_rng(0)

    def text():
        return " ".join(random.choice(WORDS, size=12))

    columns = {
        "supervised_finetuning": lambda: {"prompt": text(), "completion": text()},
        "preference": lambda: {"prompt": text(), "chosen": text(), "rejected": text()},
        "unpaired_preference": lambda: {
            "prompt": text(),
            "completion": text(),
            "label": bool(random.choice([True, False])),
        },
        "text_embedding": lambda: {"prompt": text(), "completion": text()},
        "sequence_classification": lambda: {
            "text": text(),
            "label": str(random.choice(["a", "b"])),
        },
        "multi_task": lambda: {"text": text(), "label": str(random.choice(["a", "b"]))},
    }
    make = columns.get(task, lambda: {"text": text()})
    files = [folder / f"{name}.jsonl" for name in "xy"]
    for file in files:
        file.write_text("\n".join(json.dumps(make()) for _ in range(40)))
    data = {"source": list(map(str, files))}
    gate = {}
    if task == "multi_task":
        data = {"parts": {file.stem: {"source": [str(file)]} for file in files}}
        gate = {"max_slice_regression": 0.02}
    model = {"base": str(base)}
    if task not in LANGUAGE:
        model = {"config": BERT, "tokenizer": str(base)}
    contrast = {"batch_contrastive": {"rows": 4}} if task == "text_embedding" else {}
    config = from_mapping(
        {
            "name": "tiny",
            "run": task.replace("_", "-"),
            "output": str(folder / "output"),
            "data": {
                **data,
                "task": task,
                "sequence_length": 128 if task == "preference" else 64,
                "validation_share": 0.2,
                "test_share": 0.4,
            },
            "model": model,
            "training": {"global_batch_size": 4, **contrast},
            "compute": {"device": "cpu"},
            "gate": gate,
            **sections,
        }
    )
    found = preprocess.run(config)
    opened = OpenTask(config, found)
    torch.manual_seed(0)
    exported = folder / "exported"
    opened.packager.export(opened.training.build_model(), exported)
    return config, found, opened, exported


@pytest.mark.slow
@each("task", TASKS, few=("preference", "text_embedding", "multi_task"))
def test_every_built_in_task_has_a_landscape(tmp_path, task):
    section = {"landscape": {"points": 3, "radius": 1.0, "records": 8}, "batch_size": 4}
    config, data, opened, exported = prepared(tmp_path, task, evaluation=section)
    records, done = judged_records(config, data), []
    found = measure_landscape(config, opened, exported, records, done.append)
    assert done == list(range(1, 10))
    assert found.steps == [-1, 0, 1]
    assert found.records == 8 < records.num_rows
    assert sum(ring.not_finite for ring in found.profile) == 0
    assert len({value for line in found.losses for value in line}) == 9
    again = measure_landscape(config, opened, exported, records, quiet)
    assert again == found
    # With all records, the middle is the loss that the evaluation reports.
    whole = config.model_copy(
        update={
            "evaluation": config.evaluation.model_copy(
                update={
                    "landscape": config.evaluation.landscape.model_copy(
                        update={"records": 10_000, "radius": 1e6}
                    )
                }
            )
        }
    )
    far = measure_landscape(whole, opened, exported, records, quiet)
    components = opened.packager.load_exported(exported)
    assert far.losses[1][1] == pytest.approx(
        mean_loss(opened.scorer, components, records), rel=1e-6
    )
    assert LandscapeRecord.model_validate_json(far.model_dump_json()) == far


LANDSCAPE = {"bootstrap_samples": 100, "landscape": {"points": 15, "radius": 0.5, "records": 3}}


@pytest.mark.slow
def test_killed_evaluation_gives_the_same_landscape_when_it_starts_again(tmp_path):
    whole, _ = evaluate(judged_run(tmp_path / "whole", "run", evaluation=LANDSCAPE))
    assert whole.landscape.losses[7][7] == pytest.approx(whole.metrics["loss"].value, rel=0.5)
    config = judged_run(tmp_path / "killed", "run", evaluation=LANDSCAPE)
    workspace = Workspace.of(config)
    workspace.config.write_text(config.to_yaml())
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from steadytrain.components.evaluate.step import run\n"
        "from steadytrain.components.shared.config import load\n"
        "from steadytrain.components.shared.events import EventStream\n"
        "emit = EventStream.emit\n"
        "def killed(stream, event):\n"
        "    emit(stream, event)\n"
        "    if 'landscape' in getattr(event, 'work', '') and event.done:\n"
        "        os.kill(os.getpid(), 9)\n"
        "EventStream.emit = killed\n"
        f"run(load(Path({str(workspace.config)!r})))"
    )

    def measured():
        events = read_events(workspace.events) if workspace.events.is_dir() else []
        return [
            event.done
            for event in events
            if isinstance(event, WorkProgress) and "landscape" in event.work
        ]

    step = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert step.returncode == -signal.SIGKILL
    assert 0 < measured()[-1] < 225
    assert not workspace.record("evaluate").exists()
    again, _ = evaluate(config)
    assert again.landscape == whole.landscape
    assert EvaluationRecord.load(workspace.record("evaluate")).landscape == whole.landscape
    # A third start computes nothing again.
    before = len(measured())
    evaluate(config)
    assert len(measured()) == before
    page = (workspace.evaluation / "evaluation.html").read_text()
    assert landscape_words(whole.landscape) in page


def configure(**landscape):
    return from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["x"]},
            "model": {"config": {"model_type": "llama"}},
            "evaluation": {"landscape": landscape},
        }
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"points": 14}, r"landscape\.points = 14: .*odd number from 3 to 51: use 15"),
        ({"points": 1}, r"landscape\.points = 1: .*odd number"),
        ({"points": 53}, r"landscape\.points = 53"),
        ({"points": 3, "radius": 0}, r"landscape\.radius = 0"),
        ({"records": 8}, r"landscape\.records = 8: .*points 0, nothing reads it"),
        ({"radius": 2}, r"landscape\.radius = 2.*nothing reads it"),
    ],
)
def test_bad_settings_are_rejected(section, words):
    with pytest.raises(ConfigError, match=words):
        configure(**section)


def test_only_a_landscape_that_is_on_is_part_of_the_runs_identity():
    assert configure(points=0).run_id == configure().run_id
    assert configure(points=3).run_id != configure().run_id
    assert configure(points=3, radius=2).run_id != configure(points=3).run_id


def test_another_framework_is_rejected_with_the_reason():
    config = configure(points=3)
    other = config.model.model_copy(update={"framework": "sklearn"})
    ((rule, setting, feature),) = conflicts(config.model_copy(update={"model": other}))
    assert (setting.field, feature.value) == ("evaluation.landscape.points", "sklearn")
    assert rule.why == "only weights of pytorch can be moved"
    assert not list(conflicts(config))


def bowl(points=15, broken=(), height=6.0):
    """Return an elliptic bowl whose losses are known."""
    steps = np.linspace(-1, 1, points).tolist()
    losses = [[2 + height * (0.4 * x * x + y * y) for x in steps] for y in steps]
    for row, column in broken:
        losses[row][column] = None
    return LandscapeRecord(
        records=64, radius=1.0, seed=0, steps=steps, losses=losses, profile=rings(steps, losses)
    )


def test_contours_lie_where_the_loss_is():
    plane = [[2.0 * x + 3.0 * y for x in range(6)] for y in range(5)]
    pieces = list(crossings(plane, 7.3))
    assert pieces
    for piece in pieces:
        for x, y in piece:
            assert 2 * x + 3 * y == pytest.approx(7.3)
    assert list(crossings(plane, 99.0)) == []
    plane[0][0] = None
    assert all(max(spot) >= 1 for piece in crossings(plane, 2.1) for spot in piece)


@pytest.mark.parametrize("height", [0.0, 6.0, 1e4, 1e308])
def test_drawing_is_valid_and_says_its_numbers(height):
    found = bowl(broken=[(0, 0), (14, 14)], height=height)
    drawn = landscape_map(found)
    picture = ElementTree.fromstring(drawn)
    assert picture.get("role") == "img"
    assert "not finite at 2 of 225 points" in picture.get("aria-label")
    assert "Loss 2 at the trained weights" in picture.get("aria-label")
    assert ("log scale" in drawn) == (height >= 1e4)
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("not finite", "")
    squares = [item for item in picture.iter("rect") if len(item)]
    assert len(squares) == 223
    corner, middle = (item.get("fill") for item in (squares[0], squares[111]))
    assert (corner == middle) == (height == 0)


def test_a_landscape_without_finite_losses_has_no_picture():
    steps, losses = [-1.0, 0.0, 1.0], [[None] * 3] * 3
    found = LandscapeRecord(
        records=1, radius=1.0, seed=0, steps=steps, losses=losses, profile=rings(steps, losses)
    )
    assert landscape_map(found) == ""
    assert "not finite at 9 of 9 points" in landscape_words(found)


def test_it_is_on_the_pages():
    record = EvaluationRecord(
        task="causal_lm",
        weights_digest="0",
        examples=3,
        metrics={"loss": Interval(value=2, low=1, high=3)},
        scores="",
        landscape=bowl(),
    )
    section = evaluation_section(record)["landscape"]
    assert "the cross is the trained model" in section["figures"][0].caption
    assert len(section["rows"]) == 8
    assert section["rows"][0] == ("0", ["2", "2", "2", ""])
    grid = np.array(record.landscape.losses)
    inner = grid[1:-1, 1:-1]
    edge = (grid.sum() - inner.sum()) / (grid.size - inner.size)
    assert section["rows"][-1] == ("1", ["4.400", number(edge), "10.40", ""])
    scores = pa.table({"id": ["a"], "loss": [1.0], "targets": [1], "slice": ["x"]})
    page = evaluation_page(record, scores, pa.table({"id": ["a"]}), title="a run")
    assert "Loss landscape" in page
    assert f">{number(edge)}</td>" in page
