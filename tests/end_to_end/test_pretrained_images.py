"""A small network learns one task, and others start from it: from its folder and the registry."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from steadytrain.components.images.training import ImageClassification
from steadytrain.components.shared.config import load
from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.shared.records import DataRecord, RegistrationRecord
from steadytrain.components.shared.workspace import Workspace

from support.pictures import digits, write_folders
from support.training import events_of

NEW = "the head is new, because model.base has 5 classes (0, 1, 2, 3, 4) and the data 3 (5, 6, 7)"
MODELS = {
    "vit": "{model_type: vit, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, patch_size: 2}",
    "timm": "{model_type: timm_wrapper, architecture: vit_tiny_patch16_224, "
    "model_args: {patch_size: 2, embed_dim: 32, depth: 2, num_heads: 2}}",
}
SETTINGS = [
    "data.images.size=8",
    "data.test_share=0.2",
    "training.num_train_epochs=6",
    "training.learning_rate=4e-3",
    "training.global_batch_size=32",
    "training.image_augmentation={shift: 0, rotation: 0, zoom: 0}",
    "compute.threads_per_rank=1",
]


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_model_of_one_task_is_the_start_of_another(kind, steadytrain, tmp_path):
    images, labels = digits()
    low, high = labels < 5, (labels > 4) & (labels < 8)
    first = write_folders(tmp_path / "low", images[low], labels[low])
    second = write_folders(tmp_path / "high", 255 - images[high], labels[high])

    def fields(run, source, *overrides):
        return [f"data.source=[{source}]", f"name={run}", f"run={run}", *SETTINGS, *overrides]

    done = steadytrain.run("images", *fields("base", first, f"model.config={MODELS[kind]}"))
    assert done.code == 0, done.err
    base = Workspace(steadytrain.output, "base")
    registered = RegistrationRecord.load(base.record("promote"))
    assert registered.champion
    started = {
        run: fields(run, second, f"model.base={address}", "model.config={}")
        for run, address in {
            "folder": base.model,
            "registry": f"models:/{registered.model_name}@champion",
        }.items()
    }
    steadytrain.train("images", *started["registry"])
    made = Workspace(steadytrain.output, "registry")
    assert NEW in [warned.message for warned in events_of(made, Warned)]
    data = DataRecord.load(made.record("preprocess"))
    weights = AutoModelForImageClassification.from_pretrained(base.model).state_dict()
    # One start, whatever its address.
    for given in started.values():
        config = load("images", [*given, f"output={steadytrain.output}"])
        began = ImageClassification(config, data).build_model().state_dict()
        assert {*began} == {*weights}
        fresh = {name for name in weights if not torch.equal(weights[name], began[name])}
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in fresh} <= {
            "classifier",
            "head",
        }
        assert len(fresh) == 2
    processors = [
        json.loads((one.model / "preprocessor_config.json").read_text()) for one in (base, made)
    ]
    for field in ("image_mean", "image_std", "size", "resample"):
        assert len({json.dumps(one[field]) for one in processors}) == 1
    # The second task has inverted images, so its own mean is another.
    assert processors[0]["image_mean"][0] < 0.4 < np.mean((255 - images[high]) / 255)
    assert events_of(made, Validated)[-1].metrics["accuracy"] > 0.7
