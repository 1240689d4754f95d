"""The loop depends on no tokenizer: images train through it unchanged."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.tasks.base import LossSum
from steadytrain.components.tasks.built_in import SEQUENCE_CLASSIFICATION
from steadytrain.components.train.attempt import RankError

from support.forked import train
from support.training import CLASSES, Bench, class_rows, events_of, losses_of, write_data

PATHS = os.pathsep.join(
    [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
)
DIGITS = pa.schema([("pixels", pa.list_(pa.float32())), ("label", pa.int64())])


class SmallConvolution(torch.nn.Module):
    """Classify 8 x 8 images as one of ten digits."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 16, 10),
        )

    def forward(self, pixels):
        return self.layers(pixels)


class ImageClassification:
    """Trains and packages a user-defined task."""

    metric = "accuracy"
    greater_is_better = True

    def __init__(self, config, data):
        self.data = data

    def build_model(self):
        return SmallConvolution()

    def cost(self, row):
        return 1

    def collate(self, rows):
        pixels = torch.from_numpy(np.stack([row["pixels"] for row in rows]))
        labels = torch.tensor([row["label"] for row in rows])
        return {"pixels": pixels.reshape(-1, 1, 8, 8), "labels": labels}

    def weight(self, batch):
        return len(batch["labels"])

    def compute_loss(self, model, batch):
        logits = model(batch["pixels"])
        return LossSum(functional.cross_entropy(logits, batch["labels"], reduction="sum"))

    def validate(self, model, batch):
        logits = model(batch["pixels"])
        return {
            "loss": functional.cross_entropy(logits, batch["labels"], reduction="sum").item(),
            "weight": len(logits),
            "correct": (logits.argmax(-1) == batch["labels"]).sum().item(),
        }

    def validation_metrics(self, sums):
        return {
            "loss": sums["loss"] / sums["weight"],
            "accuracy": sums["correct"] / sums["weight"],
        }

    def export(self, model, folder):
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "labels.json").write_text(json.dumps(self.data.labels))

    def load_exported(self, folder):
        model = SmallConvolution()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return {"model": model.eval()}


class Leaving(ImageClassification):
    """Code that exits the program."""

    def collate(self, rows):
        sys.exit(0)


IMAGES = replace(
    SEQUENCE_CLASSIFICATION, training=ImageClassification, packager=ImageClassification
)
LEAVING = replace(IMAGES, training=Leaving)


@pytest.fixture
def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return [
        {"pixels": (images[index] / 16).astype(np.float32), "label": int(labels[index])}
        for index in order
    ]


@pytest.mark.slow
def test_images_are_classified_by_the_same_loop(tmp_path, digits):
    data = write_data(
        tmp_path / "data",
        digits[:1400],
        digits[1400:],
        task=f"{__name__}:IMAGES",
        schema=DIGITS,
        labels=list("0123456789"),
        tokenizer=False,
    )
    bench = Bench.make(
        tmp_path / "run",
        data,
        model={"config": {"model_type": "a task builds its own"}},
        training={
            "global_batch_size": 64,
            "micro_batch_size": 32,
            "num_train_epochs": 6,
            "learning_rate": 5e-3,
            "eval_steps": 22,
        },
    )

    training = bench.train_here()

    accuracy = training.progress.best_score
    assert accuracy > 0.95
    scores = [event.metrics["accuracy"] for event in events_of(bench.workspace, Validated)]
    assert accuracy == max(scores)
    model = ImageClassification(bench.config, data).load_exported(bench.workspace.model)["model"]
    task = ImageClassification(bench.config, data)
    with torch.no_grad():
        sums = task.validate(model, task.collate(digits[1400:]))
    assert task.validation_metrics(sums)["accuracy"] == pytest.approx(accuracy)


def test_two_ranks_share_the_statistics_of_batch_normalization(tmp_path, digits, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # which forked ranks take over
    data = write_data(
        tmp_path / "data",
        digits[:64],
        digits[64:80],
        task=f"{Path(__file__).stem}:IMAGES",
        schema=DIGITS,
        labels=list("0123456789"),
        tokenizer=False,
    )
    learned = {}
    for ranks in (1, 2):
        bench = Bench.make(
            tmp_path / f"of {ranks}",
            data,
            model={"config": {"model_type": "a task builds its own"}},
            training={
                "global_batch_size": 16,
                # Ranks divide a step before micro-batches do, so one of each has the same rows.
                "micro_batch_size": 16 // ranks,
                "max_steps": 4,
                # Adam would enlarge the rounding of the bias before the layer, which has no effect.
                "optim": "sgd",
                "learning_rate": 0.1,
                "logging_steps": 1,
            },
            compute={"device": "cpu", "nproc_per_node": ranks},
        )
        assert train(bench).succeeded
        learned[ranks] = load_file(bench.workspace.model / "model.safetensors")
        told = [event.message for event in events_of(bench.workspace, Warned)]
        assert any("1 layers of batch norm" in message for message in told) == (ranks == 2)
        assert len(losses_of(bench.workspace)) == 4
    assert learned[1].keys() == learned[2].keys()
    for name, one in learned[1].items():
        torch.testing.assert_close(learned[2][name], one, rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.allclose(learned[1]["layers.1.running_var"], torch.ones(16), atol=0.1)


@pytest.mark.slow
def test_texts_are_classified(tmp_path):
    data = write_data(
        tmp_path / "data",
        class_rows(120),
        class_rows(40, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=["a", "b", "c"],
    )
    encoder = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    bench = Bench.make(
        tmp_path / "run",
        data,
        model={"config": encoder},
        training={
            "global_batch_size": 16,
            "max_steps": 60,
            "learning_rate": 3e-3,
            "eval_steps": 20,
        },
    )

    bench.train_here()

    last = events_of(bench.workspace, Validated)[-1]
    assert last.metrics["accuracy"] > 0.9


@pytest.mark.long
def test_task_that_ends_its_rank_is_reported(tmp_path, digits):
    """It would look like a rank that ended normally and wrote no result."""
    task = f"{Path(__file__).stem}:LEAVING"
    data = write_data(
        tmp_path / "data",
        digits[:64],
        digits[64:80],
        task=task,
        schema=DIGITS,
        labels=list("0123456789"),
        tokenizer=False,
    )
    bench = Bench.make(
        tmp_path / "run",
        data,
        model={"config": {"model_type": "a task builds its own"}},
        training={"global_batch_size": 8, "max_steps": 2},
    )
    ended = bench.run(PYTHONPATH=PATHS)
    assert ended.code == 1
    assert RankError.load(ended.folder.error(0)).kind == "SystemExit"
