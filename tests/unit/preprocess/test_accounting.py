"""Every record is used or left out for a named reason, in every format and in any order."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadytrain.components.preprocess.split import SIDES
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.records import DataRecord

from support.data import quarantined, read_table, sentence, side_rows, write_jsonl

FORMATS = ("jsonl", "json", "csv", "parquet", "arrow")
COLUMNS = ("text", "label")
TASKS: dict[str, dict[str, str]] = {
    "causal_lm": {},
    "sequence_classification": {},
    "supervised_finetuning": {"prompt": "text", "completion": "label"},
}
PLAIN = [{"text": sentence(seed), "label": "abc"[seed % 3]} for seed in range(60)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    else:
        table = pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in COLUMNS]))
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=7)
        else:
            with pa.ipc.new_file(str(path), table.schema) as out:
                out.write_table(table)


def prepared(rows: list[dict[str, Any]], task: str, suffix: str, files: int) -> Any:
    """Return the record of rows that are dealt to files, its card, and the rows of its sides."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / "data"
        source.mkdir()
        for number in range(files):
            write(source / f"{number}.{suffix}", rows[number::files])
        record = run(
            from_mapping(
                {
                    "name": "counted",
                    "output": str(Path(folder) / "output"),
                    "data": {
                        "source": [str(source)],
                        "task": task,
                        "columns": TASKS[task],
                        "max_bad_share": 0.9,
                        "validation_share": 0.2,
                        "test_share": 0.2,
                        "sequence_length": 192,
                    },
                    "model": {"config": {"model_type": "gpt2"}, "vocab_size": 400},
                }
            )
        )
        card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
        sides = {side: learned(record, side) for side in SIDES}
        return card, Counter(one["reason"] for one in quarantined(record)), sides


def learned(record: DataRecord, side: Any) -> list[Any]:
    """Return the documents of a side as they are learned, in an order of their own."""
    index = read_table(record.path(record.sides[side].index))["documents"].to_pylist()
    found = []
    for names, row in zip(index, side_rows(record, side), strict=True):
        start = 0
        # A classifier's rows have one document each.
        for name, length in zip(names, row.get("lengths", [None]), strict=True):
            part = slice(start, None if length is None else start + length)
            targets = row.get("targets", [])[part]
            found.append((name, row["input_ids"][part], targets, row.get("label")))
            start = part.stop
    return sorted(found, key=str)


faults = st.lists(
    st.sampled_from(
        [
            lambda row, _: {**row, "text": ""},
            lambda row, _: {**row, "text": None},
            lambda row, _: {**row, "text": " \n\t"},
            lambda row, _: {**row, "label": None},
            lambda row, _: dict(row),
            lambda row, _: {**row, "label": "abc"[("abc".index(row["label"]) + 1) % 3]},
            lambda row, _: {**row, "text": row["text"] + " indeed"},
            lambda row, _: {**row, "text": row["text"].upper() + "é字🙂"},
            lambda row, n: {**row, "text": f'"{n}, quoted ""so""'},
            lambda row, n: {**row, "text": f"{n}\r\nin two\nlines"},
            lambda row, n: {**row, "text": f"{n} " * 300},
        ]
    ),
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=faults,
    seed=st.integers(0, 1000),
    suffix=st.sampled_from(FORMATS),
    files=st.integers(1, 4),
)
def test_records_in_are_those_used_and_those_left_out_by_name(
    task: str, faults: list[Any], seed: int, suffix: str, files: int
) -> None:
    rows = [*PLAIN, *(fault(PLAIN[n], n) for n, fault in enumerate(faults))]
    card, reasons, sides = prepared(rows, task, "jsonl", 1)
    used = {name for side in sides.values() for name, *_ in side}
    assert card["records"] == len(rows)
    assert len(used) == sum(card["sides"][side]["documents"] for side in SIDES)
    assert len(used) + sum(reasons.values()) == len(rows)
    assert card["quarantine"] == reasons

    random.Random(seed).shuffle(rows)
    again, other_reasons, other_sides = prepared(rows, task, suffix, files)
    if suffix == "csv":  # it has no null
        absent = ("missing_field", "empty_field")
        reasons, other_reasons = (
            Counter("absent" if one in absent else one for one in found.elements())
            for found in (reasons, other_reasons)
        )
    assert other_reasons == reasons
    assert other_sides == sides
    assert again["records"] == len(rows)
