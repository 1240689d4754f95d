"""Built-in tasks with tiny real models: evaluate, gate, register, and load back."""

import contextlib
import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.records import DataRecord, SideRecord, TrainRecord
from steadytrain.components.shared.remote_code import code_digest
from steadytrain.components.shared.workspace import Workspace

from support.canary import infect, make_canary
from support.tiny import TEXTS, make_classifier, make_language_model, make_tokenizer

pytestmark = pytest.mark.slow

LABELS = ["code", "prose"]
LINES = [line for text in TEXTS for line in text.splitlines(keepends=True) if line.strip()]


def write(path, table):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)


@pytest.fixture
def finished(trained):
    """Make a run of a built-in task with a model that is ready for evaluation."""

    def make(run, task, tokenizer, model, records, **section):
        config = trained(run, 0.5)
        content = config.model_dump(mode="json")
        if section:
            content["model"] = section
        content["data"] |= {"task": task, "sequence_length": 64}
        content["data"].pop("source")
        # There are nine lines, and the first model of a test has learned nothing.
        content["gate"] |= {"min_units": 2, "beat_baseline": False}
        config = from_mapping(content | {"data": content["data"] | {"source": ["lines"]}})
        workspace = Workspace.of(config)
        folder = workspace.prepared / f"data-{run}"
        tokenizer.save_pretrained(folder / "tokenizer")
        ids = [tokenizer(line)["input_ids"] for line in LINES]
        shard = {"input_ids": pa.array(ids, pa.list_(pa.int32()))}
        if task == "sequence_classification":
            shard["label"] = pa.array([0] * len(ids), pa.int64())
        else:
            ones = [[1] * len(row) for row in ids]
            shard["targets"] = pa.array(ones, pa.list_(pa.int8()))
        write(folder / "train.arrow", pa.table(shard))
        write(folder / "test.arrow", records)
        side = SideRecord(shards=["train.arrow"], rows=len(ids), documents=len(ids))
        DataRecord(
            folder=str(folder), fingerprint=run, task=task, sides={"train": side},
            test_records="test.arrow", split_digest="split", sequence_length=64,
            tokenizer="tokenizer", labels=LABELS if task == "sequence_classification" else [],
        ).save(workspace.record("preprocess"))  # fmt: skip
        model.save_pretrained(workspace.model)
        tokenizer.save_pretrained(workspace.model)
        train = TrainRecord.load(workspace.record("train"))
        digest = weights_digest(workspace.model)
        train.model_copy(update={"weights_digest": digest}).save(workspace.record("train"))
        return config

    return make


def ids(count):
    return [f"id-{index}" for index in range(count)]


def lines():
    return pa.table({"id": ids(len(LINES)), "text": LINES})


def better(model, tokenizer):
    """Train the model on the test lines themselves, so it improves by more than chance."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(40):
        for line in LINES:
            row = torch.tensor([[0, *tokenizer(line)["input_ids"]]])
            model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.long
def test_language_models_with_other_tokenizers_are_compared_by_bytes(finished):
    first, second = make_tokenizer(10), make_tokenizer(100)
    random = make_language_model("gpt2", len(first))
    learned = better(make_language_model("llama", len(second)), second)
    one = finished("one", "causal_lm", first, random, lines())
    evaluation, gate = evaluate(one)
    assert gate.promoted
    assert evaluation.metrics.keys() == {"loss", "perplexity", "bits_per_byte"}
    assert evaluation.baselines.keys() == evaluation.metrics.keys()
    record = register(one)
    assert promote(one).champion
    served = mlflow.pyfunc.load_model(record.model_uri)
    assert all(isinstance(text, str) for text in served.predict(["def "]))

    two = finished("two", "causal_lm", second, learned, lines())
    mine, gate = evaluate(two)
    assert gate.promoted, gate.reason
    # The champion, loaded from the registry, gets the same score as in its own evaluation.
    assert gate.champion == pytest.approx(evaluation.metrics["bits_per_byte"].value, rel=1e-5)
    assert gate.candidate == pytest.approx(mine.metrics["bits_per_byte"].value)
    register(two)
    assert promote(two).champion


def test_fine_tuned_chat_model_is_registered_and_promoted(finished):
    tokenizer = make_tokenizer(100)
    chats = [
        json.dumps(
            [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": line.strip()}]
        )
        for line in LINES
    ]
    records = pa.table({"id": ids(len(chats)), "messages": chats})
    model = make_language_model("llama", len(tokenizer))
    config = finished("chat", "supervised_finetuning", tokenizer, model, records)
    _, gate = evaluate(config)
    assert gate.metric == "bits_per_byte"
    assert np.isfinite(gate.candidate)
    record = register(config)
    assert mlflow.pyfunc.load_model(record.model_uri).predict(["Go on."])


def test_classifier_is_registered_and_promoted(finished):
    tokenizer = make_tokenizer(100)
    labels = [LABELS[index % 2] for index in range(len(LINES))]
    records = lines().append_column("label", pa.array(labels))
    model = make_classifier(tokenizer, LABELS)
    config = finished("classes", "sequence_classification", tokenizer, model, records)
    evaluation, gate = evaluate(config)
    assert gate.metric == "accuracy"
    assert evaluation.baselines["accuracy"] == pytest.approx(labels.count("code") / len(labels))
    record = register(config)
    served = mlflow.pyfunc.load_model(record.model_uri).predict(["import json"])
    assert served["label"][0] in LABELS


@pytest.fixture
def nobody_answers(monkeypatch, tmp_path):
    def asked(*_):
        raise AssertionError("something waits for stdin")

    monkeypatch.setattr("builtins.input", asked)
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)


@pytest.fixture
def champion(finished):
    """The champion's logged files and URI, and a run with a better model to compare with it."""
    tokenizer = make_tokenizer(100)
    one = finished(
        "one", "causal_lm", tokenizer, make_language_model("llama", len(tokenizer)), lines()
    )
    evaluate(one)
    record = register(one)
    promote(one)
    learned = better(make_language_model("llama", len(tokenizer)), tokenizer)
    two = finished("two", "causal_lm", tokenizer, learned, lines())
    client = mlflow.MlflowClient()
    place = client.get_model_version_download_uri(record.model_name, record.version)
    logged = (
        mlflow.get_logged_model(place.removeprefix("models:/")) if "models:/" in place else None
    )
    folder = Path(unquote(urlsplit(logged.artifact_location if logged else place).path))
    return folder, record.model_uri, two


def change_flavors(folder, **fields):
    content = yaml.safe_load((folder / "MLmodel").read_text())
    # Who adds code to a model can also remove the digests of its files.
    content["metadata"].pop("steadytrain.files", None)
    for flavor in content["flavors"].values():
        flavor.update(fields)
    (folder / "MLmodel").write_text(yaml.safe_dump(content))


def test_hostile_champion_code_does_not_run(champion, tmp_path, nobody_answers):
    folder, uri, two = champion
    canary = tmp_path / "canary"
    infect(folder / "model", canary)
    change_flavors(folder, pipeline_model_type="CanaryForCausalLM")

    _, gate = evaluate(two)

    assert not canary.exists()
    assert not gate.promoted
    assert "modeling_canary.py" in gate.reason
    assert "model.trust_remote_code is false" in gate.reason
    # MLflow's own loader does run the code, which is why this test exists.
    with contextlib.suppress(Exception):
        mlflow.transformers.load_model(uri, return_type="components")
    assert canary.exists()


def test_code_named_by_a_champions_mlmodel_does_not_run(champion, tmp_path, nobody_answers):
    folder, uri, two = champion
    canary = tmp_path / "canary"
    (folder / "code").mkdir()
    for name in ("hostile", "transformers", "torch"):
        (folder / "code" / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    change_flavors(folder, loader_module="hostile", code="code")

    _, gate = evaluate(two)

    assert gate.promoted, gate.reason
    assert not canary.exists()
    with contextlib.suppress(Exception):
        mlflow.pyfunc.load_model(uri)
    assert canary.exists()


def test_champion_with_the_pinned_code_is_compared(finished, tmp_path, nobody_answers):
    base = make_canary(tmp_path / "base", tmp_path / "canary")
    tokenizer = make_tokenizer(100)
    pinned = {"base": str(base), "trust_remote_code": True, "revision": code_digest(base)}
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
    model = better(model, tokenizer)
    one = finished("one", "causal_lm", tokenizer, model, lines(), **pinned)
    evaluate(one)
    register(one)
    assert promote(one).champion

    two = finished("two", "causal_lm", tokenizer, better(model, tokenizer), lines(), **pinned)
    _, gate = evaluate(two)
    assert gate.champion_version == "1"
    assert gate.promoted, gate.reason

    # Without the option, the champion's code must not run, so nothing is compared or promoted.
    shutil.rmtree(Workspace.of(two).model)
    better(make_language_model("llama", len(tokenizer)), tokenizer).save_pretrained(
        Workspace.of(two).model
    )
    tokenizer.save_pretrained(Workspace.of(two).model)
    plain = two.model_copy(
        update={"model": two.model.model_copy(update={"trust_remote_code": False})}
    )
    _, gate = evaluate(plain)
    assert not gate.promoted
    assert "model.trust_remote_code is false" in gate.reason
