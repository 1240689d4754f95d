"""An exported model predicts what evaluation scored, with the code that lies beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.images.scoring import ImagePackager, ImageScorer
from steadytrain.components.images.training import ImageClassification
from steadytrain.components.shared.errors import BadInput

from support.pictures import noise, prepared, write_folders, written


def predictor(folder):
    place = importlib.util.spec_from_file_location("exported_predictor", folder / "predictor.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.Predictor(folder)


def exported(config, data, folder):
    torch.manual_seed(0)
    ImagePackager(config, data).export(ImageClassification(config, data).build_model(), folder)
    return folder


@pytest.fixture(scope="module", params=["gray", "rgb"])
def model(request, tmp_path_factory):
    """Return the configuration, the data and the folder of an exported model."""
    root = tmp_path_factory.mktemp(request.param)
    images = np.stack([noise(60, 12, seed) for seed in range(3)], -1)
    source = write_folders(root / "images", images, [number % 3 for number in range(60)])
    config, data = prepared(source, f"data.images.color={request.param}")
    return config, data, exported(config, data, root / "model")


def test_predictions_of_files_are_those_that_were_scored(model):
    config, data, folder = model
    records = judged_records(config, data)
    loaded = ImagePackager(config, data).load_exported(folder)
    scored = ImageScorer(config, data).score(loaded, records)["probabilities"].to_pylist()
    found = predictor(folder)
    prepared_ones = {
        found.prepared(path).tobytes(): path for path in Path(config.data.source[0]).glob("*/*.png")
    }
    paths = [prepared_ones[pixels] for pixels in records["pixels"].to_pylist()]
    kinds = [
        paths,
        [str(path) for path in paths],
        [path.read_bytes() for path in paths],
        [{"bytes": path.read_bytes(), "path": "x"} for path in paths],
        [np.asarray(Image.open(path)) for path in paths],
        [Image.open(path) for path in paths],
    ]
    for images in kinds:
        assert found.probabilities(images) == pytest.approx(np.array(scored), abs=1e-6)
    rows = found.rows(paths)
    assert [row["prediction"] for row in rows] == [
        data.labels[int(np.argmax(row))] for row in scored
    ]
    assert {*rows[0]} == {"prediction", *(f"probability_{label}" for label in data.labels)}


def test_image_that_cannot_be_read_is_named(model):
    found = predictor(model[2])
    good = written(noise(1)[0])
    with pytest.raises(ValueError, match=r"image 70 cannot be read: .*identify"):
        found.rows([*[good] * 70, b"no image"])
    with pytest.raises(ValueError, match="image 1 cannot be read"):
        found.rows([good, "/no/such/file.png"])


def test_model_in_color_works_in_a_pipeline_of_transformers(model):
    from transformers import pipeline

    config, data, folder = model
    if config.data.images.color == "gray":
        pytest.skip("a pipeline reads all images in color")
    image = Image.fromarray(np.stack([*noise(3, seed=20)], -1))
    found = pipeline("image-classification", model=str(folder), top_k=3)(image)
    expected = predictor(folder).rows([np.asarray(image)])[0]
    chances = {one["label"]: one["score"] for one in found}
    assert chances == pytest.approx(
        {label: expected[f"probability_{label}"] for label in data.labels}, abs=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": {"size": 16}}, "data.images.size 8, and the data have 16"),
        ({"labels": ["0", "1", "3"]}, "the model predicts the classes 0, 1, 2"),
    ],
)
def test_model_of_other_images_is_refused(model, change, message):
    config, data, folder = model
    if "labels" in change:
        data = data.model_copy(update=change)
    else:
        images = config.data.images.model_copy(update=change["images"])
        changed = config.data.model_copy(update={"images": images})
        config = config.model_copy(update={"data": changed})
    with pytest.raises(BadInput, match=message):
        ImagePackager(config, data).load_exported(folder)
    with pytest.raises(BadInput, match="no model of images"):
        ImagePackager(config, data).load_exported(folder.parent)
