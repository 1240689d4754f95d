"""`run` with data: the task is found in the first records, and never guessed."""

from __future__ import annotations

import gzip
import itertools
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess import inspection
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.pipelines.searches import searched
from steadytrain.pipelines.sources import is_data, name_for, open_source

from support.odd import call

CHAT = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}
PAIR = {"prompt": "How?", "completion": "So."}
LABELLED = {"text": "how to reset it", "label": "help"}
TEXT = {"text": "some text"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def jsonl(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "task", "preset"),
    [
        (CHAT, "supervised_finetuning", "chat"),
        (PAIR, "supervised_finetuning", "chat"),
        (LABELLED, "sequence_classification", "sequence-classification"),
        (TEXT, "causal_lm", "causal-lm"),
    ],
)
def test_columns_determine_the_task(tmp_path, row, task, preset):
    chosen = open_source(jsonl(tmp_path / "My Tickets.jsonl", row), [])
    assert chosen.config.data.task == task
    assert chosen.config.name == "my-tickets"
    assert chosen.config.data.source == [str(tmp_path / "My Tickets.jsonl")]
    assert f"task {task}" in chosen.remarks[0]
    assert chosen.remarks[1].startswith(f"preset {preset}: ")
    assert "steadytrain init" in chosen.remarks[2]


def write_table(path):
    # The price is a number with fractions; the size is a class.
    rows = [f"{n},{n * 1.5},{'big' if n % 3 else 'small'}" for n in range(40)]
    path.write_text("\n".join(["rooms,price,size", *rows]))
    return str(path)


@pytest.mark.parametrize(
    ("target", "task"),
    [
        ("price", "tabular_regression"),
        ("size", "tabular_classification"),
        ("[size, rooms]", "tabular_multi_label"),
    ],
)
def test_a_column_to_predict_makes_a_table(tmp_path, target, task):
    table = write_table(tmp_path / "houses.csv")
    chosen = open_source(table, [f"data.target={target}"])
    config = chosen.config
    assert (config.data.task, config.data.source, config.name) == (task, [table], "houses")
    assert (config.model.framework, config.training.max_steps) == ("lightgbm", 50)
    assert chosen.origin("data.target") == "--set"
    assert any("steadytrain automl" in remark for remark in chosen.remarks)
    search, remarks = searched(table, [f"data.target={target}"])
    assert (search.data.task, search.data.source, search.name) == (task, [table], "houses")
    assert remarks[0].startswith(f"task {task}, since ")


def test_a_table_without_a_column_to_predict_names_the_field(tmp_path):
    table = write_table(tmp_path / "houses.csv")
    with pytest.raises(BadInput) as caught:
        open_source(table, [])
    assert "--set data.target=COLUMN" in caught.value.remedy
    for task in ("tabular_regression", "forecasting"):
        with pytest.raises(ConfigError, match=r"data\.target"):
            open_source(table, [f"data.task={task}"])


def test_series_need_the_column_of_their_times(tmp_path):
    table = write_table(tmp_path / "houses.csv")
    settings = ["data.target=price", "data.series.time=rooms", "data.series.horizon=3"]
    config = open_source(table, settings).config
    assert (config.data.task, config.model.framework) == ("forecasting", "statsforecast")
    assert (config.data.series.time, config.data.series.column) == ("rooms", None)


def write_csv(path):
    path.write_text("text,label\nhow to,help\n")


def write_gz(path):
    path.write_bytes(gzip.compress(json.dumps(LABELLED).encode()))


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist([LABELLED] * 3), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.csv", write_csv), ("a.jsonl.gz", write_gz), ("a.parquet", write_parquet)],
)
def test_every_format_can_be_inspected(tmp_path, name, write):
    write(tmp_path / name)
    assert open_source(name, []).config.data.task == "sequence_classification"


def test_folder_of_source_code_is_text(tmp_path):
    for name in ("a.py", "b/c.py"):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text("x = 1\n")
    assert open_source("code", []).config.data.task == "causal_lm"


@pytest.mark.slow
def test_data_set_is_found_by_its_hub_address(tmp_path):
    jsonl(tmp_path / "set" / "train.jsonl", CHAT, CHAT)
    chosen = open_source("hub:set", [])
    assert chosen.config.data.source == ["hub:set"]
    assert chosen.config.data.task == "supervised_finetuning"


@pytest.mark.parametrize(
    ("rows", "tasks"),
    [
        ([{**TEXT, **CHAT}], {"supervised_finetuning", "causal_lm"}),
        ([{**LABELLED, **CHAT}], {"supervised_finetuning", "sequence_classification"}),
        (
            [{"text": "t", "label": n} for n in range(50)],
            {"sequence_classification", "sequence_regression", "causal_lm"},
        ),
    ],
)
def test_ambiguous_records_are_an_error_that_lists_the_tasks(tmp_path, rows, tasks):
    with pytest.raises(BadInput) as caught:
        open_source(jsonl(tmp_path / "a.jsonl", *rows), [])
    assert ("a lot for classes" in caught.value.message) == (len(rows) == 50)
    choices = caught.value.remedy.split(" or ")
    assert {choice.removeprefix("--set data.task=") for choice in choices} == tasks


def test_user_resolves_the_ambiguity(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {**TEXT, **CHAT})
    assert open_source(path, ["data.task=causal_lm"]).config.data.task == "causal_lm"


def test_user_names_other_columns(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"body": "how to", "class": "help"})
    with pytest.raises(BadInput, match="causal_lm needs text") as caught:
        open_source(path, [])
    assert "data.columns" in caught.value.remedy
    chosen = open_source(path, ["data.columns.text=body", "data.columns.label=class"])
    assert chosen.config.data.task == "sequence_classification"


def test_few_bad_records_do_not_hide_the_task(tmp_path):
    path = tmp_path / "a.jsonl"
    jsonl(path, *[CHAT] * 9)
    path.write_bytes(path.read_bytes() + b"{not json\n")
    assert open_source(str(path), []).config.data.task == "supervised_finetuning"


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [("", DataError, "no record"), (None, BadInput, "no file found there")],
)
def test_empty_data_are_reported(tmp_path, content, error, words):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(error, match=words):
        open_source("a.jsonl", [])


def test_model_is_rejected_as_data(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(BadInput, match="is a model") as caught:
        open_source("model", [])
    assert "--set model.base=model" in caught.value.remedy


@pytest.mark.slow
def test_hub_model_is_rejected_as_data(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="cannot be loaded") as caught:
        open_source("hub:org/some-model", [])
    assert "model.base" in caught.value.remedy


def test_only_the_first_records_are_read(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *[TEXT] * 100_000)
    decoded = itertools.count()
    check = inspection.check
    monkeypatch.setattr(inspection, "check", lambda *args: (next(decoded), check(*args))[1])
    open_source(path, [])
    assert next(decoded) == inspection.RECORDS * len(inspection.TASKS)


def test_several_files_of_a_folder_are_looked_at(tmp_path):
    for index in range(30):
        jsonl(tmp_path / "data" / f"{index:02}.jsonl", *[CHAT if index < 3 else TEXT] * 30)
    assert open_source("data", []).config.data.task == "causal_lm"


@pytest.mark.parametrize("name", ["causal-lm", "my.yaml", "my.yml", "config", "/dev/null"])
def test_other_arguments_are_presets_or_configurations(name):
    assert not is_data(name)


def test_missing_data_libraries_are_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.endswith("preprocess.inspection")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.endswith("preprocess.chunks")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BadInput, match="pyarrow") as caught:
        open_source(jsonl(tmp_path / "a.jsonl", TEXT), [])
    assert "steadytrain[data]" in caught.value.remedy


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("a/My_Data.v2.jsonl.gz", "my-data"),
        ("s3://bucket/prefix/", "prefix"),
        ("hub:org/Set?split=train", "set"),
        ("data/*.csv", "run"),
        ("x" * 60, "x" * 40),
        ("-- .txt", "run"),
    ],
)
def test_run_is_named_after_its_data(address, name):
    assert name_for(address) == name


def test_choice_is_reported_on_standard_error(tmp_path):
    jsonl(tmp_path / "a.jsonl", CHAT)
    done = call("run", "a.jsonl", "--dry-run", folder=tmp_path)
    assert done.code == 0
    assert done.out.startswith("run         a-")
    assert "task supervised_finetuning, since the record has the column messages" in done.err


def test_same_data_give_the_same_run(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", CHAT)
    first = open_source(path, []).config.run_id
    jsonl(tmp_path / "a.jsonl", CHAT, PAIR)
    assert open_source(path, []).config.run_id == first


def test_column_names_are_escaped_and_not_all_listed(tmp_path):
    odd = tmp_path / "odd.jsonl"
    columns = {"\x1b[31mred\nfix: none": "a", **{f"c{number}": "b" for number in range(50)}}
    odd.write_text(json.dumps(columns) + "\n")
    with pytest.raises(BadInput) as raised:
        open_source(str(odd), [])
    assert "\x1b" not in raised.value.message
    assert "c49" not in raised.value.message
    assert "and 39 more" in raised.value.message
