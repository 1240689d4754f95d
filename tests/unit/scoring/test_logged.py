"""Models in MLflow: pyfunc serves them, and they load back with identical weights."""

from pathlib import Path

import mlflow
import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from steadytrain.components.predict.model import open_model
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.packaging import fetched_model, log_transformers_model

from support.stores import copy_store

TEXT = pa.table({"id": ["1"], "text": ["def add(first, second):"]})
CHAT = pa.table({"id": ["1"], "messages": ['[{"role": "user", "content": "What is a stack?"}]']})


@pytest.fixture
def active_run(tmp_path, empty_store):
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        yield run
    mlflow.set_tracking_uri(None)


AUTO = {
    "text-generation": AutoModelForCausalLM,
    "text-classification": AutoModelForSequenceClassification,
}


def log(folder, records, task):
    components = {
        "model": AUTO[task].from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    return log_transformers_model(
        components, name="small", records=records, metadata={"steadytrain.task": task}, task=task
    )


def read_back(uri, task):
    with fetched_model(uri) as (model, tokenizer):
        return {
            "model": AUTO[task].from_pretrained(model, dtype=torch.float32),
            "tokenizer": load_tokenizer(tokenizer),
        }


@pytest.mark.slow
def test_language_model_is_served_and_read_back(active_run, language_folder, tokenizer):
    uri = log(language_folder, CHAT, "text-generation")
    served = mlflow.pyfunc.load_model(uri)
    assert served.metadata.signature.inputs.input_types()
    assert served.metadata.metadata["steadytrain.task"] == "text-generation"
    assert "What is a stack?" in str(served.input_example)
    assert all(isinstance(text, str) for text in served.predict(["def push("]))

    loaded = read_back(uri, "text-generation")
    assert loaded["tokenizer"].get_vocab() == tokenizer.get_vocab()
    original = type(loaded["model"]).from_pretrained(language_folder).state_dict()
    for name, weight in loaded["model"].state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, original[name])


@pytest.mark.slow
def test_classifier_is_served_with_labels_and_scores(active_run, classifier_folder):
    uri = log(classifier_folder, TEXT, "text-classification")
    served = mlflow.pyfunc.load_model(uri)
    found = served.predict(["import json", "x = 1\n" * 500])
    assert set(found["label"]) <= {"code", "prose"}
    assert found["score"].between(0.5, 1).all()
    assert [column.name for column in served.metadata.signature.outputs] == ["label", "score"]
    assert read_back(uri, "text-classification")["model"].config.id2label == {0: "code", 1: "prose"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model/model.safetensors", "components/tokenizer/tokenizer.json"])
def test_damaged_classifier_is_refused_by_the_file(active_run, classifier_folder, tmp_path, name):
    uri = log(classifier_folder, TEXT, "text-classification")
    folder = Path(mlflow.artifacts.download_artifacts(uri))
    assert open_model(str(folder), tmp_path, {}).answers(["import json"])
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    for opened in (lambda: open_model(str(folder), tmp_path, {}), fetched_model(uri).__enter__):
        with pytest.raises(BadInput, match=f"is damaged: {name} differs from what was logged"):
            opened()
