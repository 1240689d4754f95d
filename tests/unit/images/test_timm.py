"""timm's models, by name and from timm's own folders, equal to timm called directly."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.images.predictor import Predictor
from steadytrain.components.images.scoring import ImagePackager, ImageScorer
from steadytrain.components.images.training import ImageClassification, image_scale
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.checks import check_task

from support.pictures import image_config

SIZES = {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = (
    "model.config={model_type: timm_wrapper, architecture: vit_tiny_patch16_224, "
    "model_args: {patch_size: 2, embed_dim: 32, depth: 2, num_heads: 2}}"
)
RESNET = "model.config={model_type: timm_wrapper, architecture: resnet10t}"
RECIPE = [
    "training.global_batch_size=16",
    "training.max_steps=8",
    "training.save_steps=4",
    "training.eval_steps=4",
    "training.logging_steps=1",
    "training.warmup_steps=0",
    "training.seed=5",
]


def by_timm(folder, name, classes=10, **arguments):
    """Return timm's own model with the weights of an exported folder."""
    import timm  # takes seconds

    model = timm.create_model(name, num_classes=classes, in_chans=1, **arguments)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({key.removeprefix("timm_model."): one for key, one in weights.items()})
    return model.eval()


@pytest.mark.parametrize(
    ("field", "name", "arguments"),
    [(VIT, "vit_tiny_patch16_224", {"img_size": 8, **SIZES}), (RESNET, "resnet10t", {})],
)
def test_exported_model_is_that_of_timm(bench, tmp_path, field, name, arguments):
    made = bench(field)
    torch.manual_seed(3)
    task = ImageClassification(made.config, made.data)
    model = task.build_model()
    packager = ImagePackager(made.config, made.data)
    packager.export(model, tmp_path)
    theirs = by_timm(tmp_path, name, **arguments)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(256, size=(40, 1, 8, 8)))
    mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in task.scale)
    with torch.no_grad():
        expected = theirs((pixels.float() / 255 - mean) / deviation)
    images = list(pixels[:, 0].numpy().astype(np.uint8))
    found = Predictor(tmp_path).probabilities(images)
    assert found == pytest.approx(expected.double().softmax(-1).numpy(), abs=1e-6)
    logits = task.logits(model.eval(), {"pixels": pixels.byte()})
    assert logits.detach().numpy() == pytest.approx(expected.numpy(), abs=1e-6)
    loaded = packager.load_exported(tmp_path)
    records = judged_records(made.config, made.data)
    scored = ImageScorer(made.config, made.data).score(loaded, records)["probabilities"]
    shown = [np.frombuffer(one, np.uint8).reshape(8, 8) for one in records["pixels"].to_pylist()]
    assert np.array(scored.to_pylist()) == pytest.approx(
        Predictor(tmp_path).probabilities(shown), abs=1e-6
    )
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["pretrained_cfg"]["input_size"] == [1, 8, 8]
    assert content["pretrained_cfg"]["mean"] == task.scale[0]


def test_new_model_has_timms_own_random_weights(bench):
    import timm

    made = bench(RESNET)
    convolution = ImageClassification(made.config, made.data).build_model().timm_model.layer1[0]
    theirs = timm.create_model("resnet10t", in_chans=1).layer1[0]
    ours, expected = (one.conv1.weight.std().item() for one in (convolution, theirs))
    # Transformers would draw all from a deviation of 0.02.
    assert ours == pytest.approx(expected, rel=0.05)
    assert ours > 0.04


@pytest.mark.slow
def test_resumed_run_has_the_same_weights(bench, tmp_path):
    whole = bench(VIT, *RECIPE, root=tmp_path / "whole")
    whole.train_here()
    made = bench(VIT, *RECIPE)
    made.train_here(2, resume_from=whole.workspace.checkpoints / "step-00000004")
    expected, found = (
        load_file(one.workspace.model / "model.safetensors") for one in (whole, made)
    )
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture
def folder(tmp_path):
    """Return a folder as timm saves a model of gray images, with 7 classes."""
    import timm

    arguments = {"img_size": 8, "in_chans": 1, **SIZES}
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **arguments)
    model.pretrained_cfg |= {"input_size": (1, 8, 8), "mean": (0.4,), "std": (0.3,)}
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=arguments, safe_serialization=True)
    return tmp_path / "timm"


def test_folder_of_timm_is_a_base(bench, folder):
    made = bench(f"model.base={folder}", "model.config={}")
    task = ImageClassification(made.config, made.data)
    model = task.build_model()
    weights = load_file(folder / "model.safetensors")
    found = {name.removeprefix("timm_model."): one for name, one in model.state_dict().items()}
    assert {*found} == {*weights}
    own = {name for name in weights if not torch.equal(weights[name], found[name])}
    assert own == {"head.weight", "head.bias"}
    assert found["head.weight"].shape == (10, 32)
    assert image_scale(made.config, made.data) == ([0.4], [0.3])
    head, interpolation = task.ready(model)
    assert "the head is new, because model.base has 7 classes" in head
    assert interpolation == (
        "model.base has learned from images with interpolation bicubic (config.json), and "
        "data.images.interpolation is bilinear"
    )


def test_rows_of_timms_head_move_with_their_classes(bench, tmp_path):
    made = bench(VIT)
    model = ImageClassification(made.config, made.data).build_model()
    labels = made.data.labels[::-1]
    turned = made.data.model_copy(update={"labels": labels})
    ImagePackager(made.config, turned).export(model, tmp_path / "base")
    content = json.loads((tmp_path / "base" / "config.json").read_text())
    content["label_names"] = labels
    (tmp_path / "base" / "config.json").write_text(json.dumps(content))
    made = bench(f"model.base={tmp_path / 'base'}", "model.config={}")
    task = ImageClassification(made.config, made.data)
    found = task.build_model()
    assert torch.equal(found.timm_model.head.weight, model.timm_model.head.weight.flip(0))
    assert "now in the order of the data" in task.ready(found)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.images.size=16", r"data\.images\.size = 16: the model has image_size 8"),
        ("data.images.color=rgb", r"data\.images\.color = 'rgb': the model has num_channels 1"),
    ],
)
def test_base_of_other_images_is_refused(bench, folder, change, message):
    made = bench(f"model.base={folder}", "model.config={}", change)
    with pytest.raises(BadInput, match=message):
        ImageClassification(made.config, made.data).build_model()


def test_weights_of_another_model_are_refused(bench, folder):
    content = json.loads((folder / "config.json").read_text())
    content["model_args"]["depth"] = 3
    (folder / "config.json").write_text(json.dumps(content))
    made = bench(f"model.base={folder}", "model.config={}")
    with pytest.raises(
        BadInput, match=r"lacks 12 weights of the model, such as timm_model\.blocks"
    ):
        ImageClassification(made.config, made.data).build_model()


def test_unknown_name_is_refused_with_those_like_it(tmp_path):
    wrong = "model.config={model_type: timm_wrapper, architecture: resnet19}"
    with pytest.raises(ConfigError, match=r"(?s)timm has no such model.*resnet18") as caught:
        check_task(image_config(tmp_path, wrong))
    assert "model.config.architecture = 'resnet19'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.config\.architecture"):
        check_task(image_config(tmp_path, "model.config={model_type: timm_wrapper}"))
    check_task(image_config(tmp_path, RESNET))


def test_scale_of_timms_weights_is_there_by_name(bench):
    made = bench(RESNET, "data.images.normalization=model", "data.images.color=rgb")
    assert image_scale(made.config, made.data)[0] == pytest.approx([0.485, 0.456, 0.406])


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos", "nearest"])
def test_images_are_resized_as_the_field_says(interpolation):
    from steadytrain.components.images.encoder import read_image

    from support.pictures import noise, written

    config = load(
        "images", [f"data.images={{size: 8, color: gray, interpolation: {interpolation}}}"]
    )
    image = noise(1, 20)[0]
    found = read_image("image", written(image), config.data.images)
    expected = Image.fromarray(image).resize((8, 8), Image.Resampling[interpolation.upper()])
    assert found.pixels == np.asarray(expected).tobytes()
