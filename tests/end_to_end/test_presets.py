"""Every preset runs end to end, scaled down: real data, the real DAG, a real registry."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import mlflow
import pytest

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
    TrainRecord,
)

from support.command import COMPILED, TINY_LM, TINY_RUN
from support.selected import each

STEPS = ["preprocess", "train", "evaluate", "gate", "register"]
RECORDS = [DataRecord, TrainRecord, EvaluationRecord, GateRecord, RegistrationRecord]


def records(folder):
    pairs = zip(STEPS, RECORDS, strict=True)
    return {name: kind.load(folder / "records" / f"{name}.json") for name, kind in pairs}


def registered(output, uri):
    store = f"sqlite:///{output / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    # Code elsewhere in this process may have set a registry, which would override the tracking
    # server.
    mlflow.set_registry_uri(store)
    return mlflow.pyfunc.load_model(uri)


@pytest.fixture(scope="module")
def lm(shared_steadytrain, tmp_path_factory):
    """Train the first run of a small causal language model."""
    scratch = tmp_path_factory.mktemp("scratch")
    done = shared_steadytrain.run("causal-lm", *TINY_LM, TMPDIR=str(scratch))
    assert done.code == 0, done.out + done.err
    assert {path.name for path in scratch.iterdir()} <= {COMPILED}
    return done


@pytest.mark.core
def test_causal_lm_ends_with_a_registered_champion(lm):
    (folder,) = lm.runs
    found = records(folder)
    assert found["gate"].promoted
    assert found["train"].steps == 6
    version = found["register"]
    assert version.model_name in lm.out
    assert found["gate"].reason in lm.out
    assert str(folder / "report.html") in lm.out
    assert "mlflow ui --backend-store-uri" in lm.out
    model = registered(lm.output, f"models:/{version.model_name}@champion")
    assert model.predict(["import json\n"])


def test_changed_configuration_leaves_a_finished_run_unchanged(shared_steadytrain, lm):
    (folder,) = lm.runs
    kept = {
        path: path.read_bytes()
        for path in (folder / "config.yaml", folder / "report.html", *folder.glob("records/*"))
    }
    changed = (f"run={folder.name}", "training.weight_decay=0.5")
    done = shared_steadytrain.run("causal-lm", *TINY_LM, *changed)
    assert done.code == 2
    assert "training.weight_decay 0.1 -> 0.5" in done.err
    assert "give this run another name" in done.err
    assert {path: path.read_bytes() for path in kept} == kept
    assert "finished" in shared_steadytrain("list", "--output", lm.output).out


def test_predict_continues_each_text_with_the_champion(lm, shared_steadytrain, tmp_path):
    (folder,) = lm.runs
    address = f"{records(folder)['register'].model_name}@champion"
    texts = [{"text": "import json"}, {"text": ""}, {"text": "def main():"}]
    source = tmp_path / "texts.jsonl"
    source.write_text("\n".join(map(json.dumps, texts)))
    line = ["predict", address, source, "--output", lm.output]
    done = shared_steadytrain(*line, sets=("data.max_bad_share=0.5",))
    assert done.code == 0, done.err
    rows = [json.loads(text) for text in done.out.splitlines()]
    assert [row["line"] for row in rows] == [1, 3]
    assert rows[0]["prediction"].startswith("import json")


def test_report_shows_what_happened(lm):
    (folder,) = lm.runs
    page = (folder / "report.html").read_text()
    assert records(folder)["gate"].reason.split(":")[0] in page
    assert "<script src" not in page


def test_repeated_command_repeats_no_work(lm, shared_steadytrain):
    (folder,) = lm.runs
    before = records(folder)
    again = shared_steadytrain.run("causal-lm", *TINY_LM)
    assert again.code == 0, again.out + again.err
    after = records(folder)
    assert again.runs == [folder]
    assert after["train"] == before["train"]
    assert after["register"].version == before["register"].version
    assert after["preprocess"].fingerprint == before["preprocess"].fingerprint


@each("step", ["preprocess", "train", "evaluate", "register", "promote"], few=("train", "evaluate"))
def test_finished_step_imports_no_heavy_packages(lm, step):
    (folder,) = lm.runs
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from steadytrain.components.shared.config import load\n"
        "from steadytrain.pipelines.steps import run_step\n"
        f"run_step({step!r}, load(Path({str(folder / 'config.yaml')!r})))\n"
        "print([name for name in ('torch', 'transformers', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_second_run_reuses_the_data_and_is_gated(lm, shared_steadytrain):
    other = shared_steadytrain.run("causal-lm", *TINY_LM, "training.learning_rate=1e-9")
    assert other.code == 0, other.out + other.err
    first, second = (records(folder) for folder in sorted(lm.runs, key=_age))
    assert second["preprocess"].fingerprint == first["preprocess"].fingerprint
    assert not second["gate"].promoted
    assert second["gate"].champion_version == first["register"].version
    assert second["gate"].reason in other.out


def _age(folder):
    return (folder / "config.yaml").stat().st_ctime


def test_chat_fine_tunes_a_model_from_the_registry(shared_steadytrain, lm, tmp_path):
    """Real questions and answers: what a standard library function does, from its docstring."""
    data = tmp_path / "chat.jsonl"
    lines = [
        json.dumps(pair) for pair in docstrings(["json", "email.message", "logging", "shutil"])
    ]
    data.write_text("\n".join(lines))
    done = shared_steadytrain.train(
        "chat",
        *TINY_RUN,
        f"data.source=[{data}]",
        "model.base=models:/stdlib-lm@champion",
        "data.sequence_length=64",
        "data.test_share=0.2",
        "data.validation_share=0.2",
    )
    (folder,) = (run for run in done.runs if run.name.startswith("chat-"))
    side = DataRecord.load(folder / "records" / "preprocess.json").sides["train"]
    assert 0 < side.target_tokens < side.tokens, "prompts are masked out of the loss"
    trained = TrainRecord.load(folder / "records" / "train.json")
    assert (trained.outcome, trained.steps) == ("finished", 6)


@pytest.mark.long
def test_preferences_tune_a_model_from_the_registry(shared_steadytrain, lm, tmp_path):
    data = tmp_path / "preferences.jsonl"
    modules = ["json", "email.message", "logging", "shutil"]
    pairs = [
        {"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": "I do not know."}
        for pair in docstrings(modules)
    ]
    data.write_text("\n".join(map(json.dumps, pairs)))
    done = shared_steadytrain.run(
        "preference",
        *TINY_RUN,
        f"data.source=[{data}]",
        "model.base=models:/stdlib-lm@champion",
        "training.learning_rate=1e-3",
        "data.sequence_length=64",
        "data.test_share=0.2",
        "data.validation_share=0.2",
        "gate.floors={preference_accuracy: 0.01}",
    )
    assert done.code == 0, done.out + done.err
    (folder,) = (run for run in done.runs if run.name.startswith("preference-"))
    found = records(folder)
    metrics = found["evaluate"].metrics
    assert metrics["loss"].value < found["evaluate"].baselines["loss"]
    assert metrics["preference_margin"].value > 0
    assert "preference accuracy" in found["gate"].reason
    assert found["register"].model_name == "preference"


@pytest.mark.long
def test_feedback_without_pairs_tunes_a_model_from_the_registry(shared_steadytrain, lm, tmp_path):
    data = tmp_path / "feedback.jsonl"
    rows = [
        {"prompt": pair["prompt"], "completion": completion, "label": good}
        for pair in docstrings(["json", "email.message", "logging", "shutil"])
        for completion, good in ((pair["completion"], True), ("I do not know.", False))
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    done = shared_steadytrain.run(
        "preference",
        *TINY_RUN,
        "name=feedback",
        "data.task=unpaired_preference",
        f"data.source=[{data}]",
        "model.base=models:/stdlib-lm@champion",
        "training.learning_rate=1e-3",
        "data.sequence_length=64",
        "data.test_share=0.2",
        "data.validation_share=0.2",
        "gate.floors={preference_accuracy: 0.01}",
    )
    assert done.code == 0, done.out + done.err
    (folder,) = (run for run in done.runs if run.name.startswith("feedback-"))
    found = records(folder)
    metrics = found["evaluate"].metrics
    assert metrics["loss"].value < found["evaluate"].baselines["loss"] == 0.5
    assert metrics["preference_margin"].value > 0
    assert found["register"].model_name == "feedback"


@pytest.mark.long
def test_masked_lm_ends_with_an_encoder_that_fills_gaps(steadytrain):
    settings = [item for item in TINY_LM if "key_value" not in item]
    done = steadytrain.run("masked-lm", *settings)
    assert done.code == 0, done.out + done.err
    (folder,) = done.runs
    found = records(folder)
    assert found["gate"].promoted
    assert {"loss"} == found["evaluate"].metrics.keys() == found["evaluate"].baselines.keys()
    model = registered(done.output, f"models:/{found['register'].model_name}@champion")
    assert len(model.predict(["import <|mask|>\n"])) == 1


@pytest.mark.long
def test_denoising_ends_with_a_model_that_writes_spans(steadytrain):
    done = steadytrain.run("denoising", *TINY_LM)
    assert done.code == 0, done.out + done.err
    (folder,) = done.runs
    found = records(folder)
    assert found["gate"].promoted
    assert {"loss"} == found["evaluate"].metrics.keys() == found["evaluate"].baselines.keys()
    model = registered(done.output, f"models:/{found['register'].model_name}@champion")
    assert len(model.predict(["import <extra_id_0>.path<extra_id_0>"])) == 1


@pytest.mark.long
def test_text_embedding_ends_with_an_encoder_that_finds_files(steadytrain):
    done = steadytrain.run(
        "text-embedding",
        *TINY_RUN,
        "data.source=[package:stdlib/asyncio,package:stdlib/email,package:stdlib/encodings]",
        "data.exclude=[]",
        "data.sequence_length=32",
        "training.batch_contrastive.rows=4",
    )
    assert done.code == 0, done.out + done.err
    (folder,) = done.runs
    found = records(folder)
    # Twelve files cannot show that six steps made the pretrained encoder better.
    assert [item.what for item in found["gate"].comparisons] == ["model.base"]
    assert "not shown to be better than model.base" in found["gate"].reason
    names = {"loss", "recall_at_1", "mean_reciprocal_rank"}
    assert names == found["evaluate"].metrics.keys() == found["evaluate"].baselines.keys()
    version = found["register"]
    model = registered(done.output, f"models:/{version.model_name}/{version.version}")
    states = model.predict(["email/mime/text.py"])
    assert states.shape[-1] == 384


@pytest.mark.long
def test_multi_task_learns_both_parts_and_one_is_extracted(steadytrain, tmp_path):
    done = steadytrain.run(
        "multi-task",
        *TINY_RUN,
        "data.parts.sklearn.source=[package:sklearn/cluster,package:sklearn/linear_model]",
        "data.parts.stdlib.source=[package:stdlib/asyncio,package:stdlib/email]",
        "data.sequence_length=32",
        "training.multi_task.loss_weighting=uncertainty",
        "training.max_steps=16",
        "training.eval_steps=16",
        "training.save_steps=16",
        "gate.min_slice_examples=1",
    )
    assert done.code == 0, done.out + done.err
    (folder,) = done.runs
    found = records(folder)
    labels = ["sklearn/cluster", "sklearn/linear_model", "stdlib/asyncio", "stdlib/email"]
    assert found["preprocess"].labels == labels
    judged = found["evaluate"]
    assert judged.slices.keys() == {"sklearn", "stdlib"}
    areas = [values["auroc"] for values in judged.slices.values()]
    assert judged.metrics["auroc"].value == pytest.approx(sum(areas) / 2)
    version = found["register"]
    address = f"models:/{version.model_name}@candidate"
    part = tmp_path / "stdlib"
    told = steadytrain("extract", address, "stdlib", part, "--output", done.output)
    assert told.code == 0, told.out + told.err
    config = json.loads((part / "config.json").read_text())
    assert config["id2label"] == {"0": "asyncio", "1": "email"}


def docstrings(modules):
    for name in modules:
        for _, function in inspect.getmembers(importlib.import_module(name), callable):
            text = inspect.getdoc(function)
            if text and len(text) > 40:
                yield {"prompt": f"What does {name}.{function.__name__} do?", "completion": text}


def test_sequence_classification_from_a_pretrained_encoder(steadytrain):
    done = steadytrain.run(
        "sequence-classification",
        *TINY_RUN,
        "data.source=[package:stdlib/asyncio,package:stdlib/email,package:stdlib/encodings]",
        "data.sequence_length=32",
        "training.global_batch_size=8",
        "training.learning_rate=5e-4",
        "training.max_steps=16",
        "training.eval_steps=16",
        "training.save_steps=16",
        "evaluation.max_examples=40",
    )
    assert done.code == 0, done.out + done.err
    (folder,) = done.runs
    found = records(folder)
    assert found["preprocess"].labels == ["asyncio", "email", "encodings"]
    judged = found["evaluate"]
    assert judged.metrics["accuracy"].value > judged.baselines["accuracy"]
    assert sum(map(sum, judged.confusion)) == judged.examples
    version = found["register"]
    model = registered(done.output, f"models:/{version.model_name}@candidate")
    assert len(model.predict(["import asyncio\n"])) == 1


@pytest.mark.long
def test_distillation_learns_from_the_stored_answers_of_a_registered_classifier(steadytrain):
    settings = [
        *TINY_RUN,
        "data.source=[package:stdlib/asyncio,package:stdlib/email,package:stdlib/encodings]",
        "data.sequence_length=32",
        "training.global_batch_size=8",
        "training.max_steps=16",
        "training.eval_steps=16",
        "training.save_steps=16",
        "evaluation.max_examples=40",
    ]
    teacher = steadytrain.run("sequence-classification", *settings, "training.learning_rate=5e-4")
    assert teacher.code == 0, teacher.out + teacher.err
    distillation = "training.distillation={teacher: models:/stdlib-packages@candidate, top_k: 3}"
    done = steadytrain.run("distillation", *settings, distillation)
    assert done.code == 0, done.out + done.err
    (folder,) = (run for run in done.runs if run.name.startswith("stdlib-distilled-"))
    found = records(folder)
    (answers,) = (done.output / "data").glob("*.teacher-*")
    assert answers.name.startswith(found["preprocess"].fingerprint)
    rows = sum(stored.batch.num_rows for file in answers.iterdir() for stored in open_batches(file))
    assert rows == found["preprocess"].sides["train"].rows
    assert found["register"].model_name == "stdlib-distilled"
