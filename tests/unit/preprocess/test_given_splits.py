"""The splits that a data set has are the sides of the split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.preprocess.split import content_id, side_of_file, side_of_split
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError, SteadytrainError
from steadytrain.components.shared.records import DataRecord, Side

from .conftest import Configure
from support.data import documents, sentence, texts, write_jsonl

SIDES: tuple[Side, ...] = ("train", "validation", "test")
TRAIN, TEST = texts(60), texts(30, start=1000)


def ids(rows: list[dict[str, Any]]) -> set[str]:
    return {content_id(row["text"]).hex() for row in rows}


def card(record: DataRecord) -> dict[str, Any]:
    return json.loads(record.path("card.json").read_text())


def saved(folder: Path) -> list[Path]:
    datasets = pytest.importorskip("datasets")
    splits = {"train": TRAIN, "test": TEST}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    ).save_to_disk(folder)
    return [folder]


def saved_alone(folder: Path) -> list[Path]:
    saved(folder)
    return [write_jsonl(folder / "all.jsonl", TRAIN), folder / "test"]


def clone(folder: Path) -> list[Path]:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A data set\n")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"text": "no record"}}))
    for name, rows in {"train": TRAIN, "test": TEST}.items():
        path = folder / "data" / f"{name}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    return [folder]


def lines(folder: Path) -> list[Path]:
    write_jsonl(folder / "train.jsonl", TRAIN)
    write_jsonl(folder / "test.jsonl", TEST)
    return [folder]


def listed(folder: Path) -> list[Path]:
    lines(folder)
    return [folder / "train.jsonl", folder / "test.jsonl"]


def found(folder: Path) -> list[Path]:
    return [lines(folder)[0] / "*.jsonl"]


def folders(folder: Path) -> list[Path]:
    write_jsonl(folder / "train" / "0.jsonl", TRAIN)
    write_jsonl(folder / "test" / "0.jsonl", TEST)
    return [folder / "train", folder / "test"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [saved, saved_alone, clone, lines, listed, found, folders])
def test_named_splits_are_kept(
    layout: Callable[[Path], list[Path]], configure: Configure, tmp_path: Path
) -> None:
    sources = [str(path) for path in layout(tmp_path / "set")]
    kept = run(configure(sources))
    sides = {side: documents(kept, side) for side in SIDES}
    assert sides["test"] == ids(TEST)
    assert sides["train"] | sides["validation"] == ids(TRAIN)
    assert 0 < len(sides["validation"]) < len(sides["train"])
    assert card(kept)["records"] == 90
    assert card(kept)["warnings"] == [
        "data.source has a test split of 30 records, kept as that side of the split; data.splits: "
        "pool draws a new split from all records"
    ]


def test_splits_are_pooled(configure: Configure, tmp_path: Path) -> None:
    (folder,) = lines(tmp_path / "set")
    pooled = run(configure(folder, splits="pool"))
    assert documents(pooled, "train") & ids(TEST)
    assert card(pooled)["warnings"] == [
        "30 records of validation and test splits in data.source are pooled with the others, "
        "because data.splits is pool: a new split is drawn from all of them"
    ]


def test_pooling_nothing_is_reported(configure: Configure, tmp_path: Path) -> None:
    prepared = run(configure(write_jsonl(tmp_path / "all.jsonl", TRAIN), splits="pool"))
    assert card(prepared)["warnings"] == [
        "data.splits is pool, but no name in data.source says validation or test"
    ]


def test_files_that_describe_the_data_are_counted(configure: Configure, tmp_path: Path) -> None:
    (folder,) = clone(tmp_path / "set")
    (folder / "readme.txt").write_text("no record")
    other = saved(tmp_path / "saved")[0]
    write_jsonl(other / "more.jsonl", TRAIN)
    counts = {"files in the folder of a saved data set that are not its own": 1}
    assert find_inputs(configure(other).data).left_out == counts
    # The suffix of README.md is not read.
    counts = {"files that describe the data": 2, "files with a suffix that is not read": 1}
    assert find_inputs(configure(folder).data).left_out == counts
    assert find_inputs(configure(write_text(tmp_path / "texts")).data).left_out == {}


def write_text(folder: Path) -> Path:
    folder.mkdir()
    (folder / "readme.txt").write_text("a text among others\n")
    (folder / "other.txt").write_text("another text\n")
    return folder


def test_fields_give_the_sides(configure: Configure, tmp_path: Path) -> None:
    (folder,) = lines(tmp_path / "set")
    chosen = write_jsonl(tmp_path / "chosen.jsonl", texts(20, start=2000))
    config = configure(
        folder, validation_source=[str(chosen)], test_source=[str(folder / "test.jsonl")]
    )
    prepared = run(config)
    assert documents(prepared, "train") == ids(TRAIN)
    assert documents(prepared, "validation") == ids(texts(20, start=2000))
    assert documents(prepared, "test") == ids(TEST)
    assert card(prepared)["warnings"] == []
    assert card(prepared)["source"] == [str(folder), str(chosen), str(folder / "test.jsonl")]


def test_training_copies_of_held_out_records_go(configure: Configure, tmp_path: Path) -> None:
    # A copy, and nearly a copy.
    almost = {"text": TEST[1]["text"].removesuffix(TEST[1]["text"].split()[-1]) + "changed"}
    (folder,) = lines(tmp_path / "set")
    write_jsonl(folder / "train.jsonl", [*TRAIN, TEST[0], almost])
    prepared = run(configure(folder))
    assert documents(prepared, "test") == ids(TEST)
    assert documents(prepared, "train") | documents(prepared, "validation") == ids(TRAIN)
    assert card(prepared)["duplicates"]["leakage"] == 2


def test_groups_of_held_out_records_go(configure: Configure, tmp_path: Path) -> None:
    def rows(start: int, groups: range) -> list[dict[str, Any]]:
        found = zip(groups, texts(30, start), strict=True)
        return [{**row, "speaker": f"s{group}"} for group, row in found]

    write_jsonl(tmp_path / "set" / "train.jsonl", rows(0, range(30)))
    write_jsonl(tmp_path / "set" / "test.jsonl", rows(1000, range(25, 55)))
    prepared = run(configure(tmp_path / "set", columns={"group": "speaker"}))
    assert documents(prepared, "test") == ids(TEST)
    assert documents(prepared, "train") | documents(prepared, "validation") == ids(texts(25))
    assert card(prepared)["duplicates"]["group_leakage"] == 5


def test_one_prompt_on_both_sides_is_an_error_that_names_the_field(
    configure: Configure, tmp_path: Path
) -> None:
    for name, rows in {"train": TRAIN, "test": TEST}.items():
        pairs = [{"prompt": "Go on.", "completion": row["text"]} for row in rows]
        write_jsonl(tmp_path / "set" / f"{name}.jsonl", pairs)
    with pytest.raises(DataError, match=r"30 usable records, and left out are 60 group_l") as error:
        run(configure(tmp_path / "set", task="supervised_finetuning"))
    assert "near_duplicate" not in error.value.remedy
    assert "set data.group_by_prompt to false" in error.value.remedy


def test_the_digest_is_that_of_the_held_out_records(configure: Configure, tmp_path: Path) -> None:
    (folder,) = lines(tmp_path / "set")
    first = run(configure(folder))
    assert run(configure(folder, test_share=0.3)).split_digest == first.split_digest
    assert run(configure(folder, validation_share=0.3)).split_digest != first.split_digest
    write_jsonl(folder / "train.jsonl", [*TRAIN, *texts(10, start=3000)])
    more = run(configure(folder))
    assert more.split_digest == first.split_digest
    assert more.fingerprint != first.fingerprint
    write_jsonl(folder / "test.jsonl", TEST[1:])
    assert run(configure(folder)).split_digest != first.split_digest


def test_classes_are_divided_among_the_other_records(configure: Configure, tmp_path: Path) -> None:
    def rows(start: int) -> list[dict[str, Any]]:
        return [{**row, "label": "ab"[n % 2]} for n, row in enumerate(texts(40, start))]

    lone = {"text": sentence(5000), "label": "rare"}
    write_jsonl(tmp_path / "set" / "train.jsonl", [*rows(0), lone])
    write_jsonl(tmp_path / "set" / "test.jsonl", rows(1000))
    prepared = run(configure(tmp_path / "set", task="sequence_classification"))
    sides = card(prepared)["sides"]
    assert sides["test"]["labels"] == {"a": 20, "b": 20}
    assert sides["validation"]["labels"] == {"a": 4, "b": 4}
    assert sides["train"]["labels"] == {"a": 16, "b": 16, "rare": 1}
    assert card(prepared)["warnings"][1] == (
        "1 class has too few records for 2 sides, so all of them are in training: rare"
    )


def test_one_held_out_split_alone_is_divided(configure: Configure, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", TRAIN)
    prepared = run(configure(path))
    assert sum(side.documents for side in prepared.sides.values()) == 60
    assert card(prepared)["warnings"] == [
        "data.source has a test split of 60 records, and no other records: a new split is drawn "
        "from all records"
    ]
    other = write_jsonl(tmp_path / "other.jsonl", TEST)
    with pytest.raises(DataError, match="a test split of 60 records, and no other records"):
        run(configure(path, validation_source=[str(other)]))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"test_source": ["other.jsonl"]}, "data.test_source is set, but data.source has records"),
        ({"test_source": ["nothing.jsonl"], "splits": "pool"}, "data.test_source = .*no file"),
        ({"test_source": ["empty.jsonl"], "splits": "pool"}, "the test side of the split is empty"),
    ],
)
def test_sides_that_cannot_be_given(
    data: dict[str, Any], named: str, configure: Configure, tmp_path: Path
) -> None:
    (folder,) = lines(tmp_path / "set")
    write_jsonl(tmp_path / "other.jsonl", texts(20, start=2000))
    write_jsonl(tmp_path / "empty.jsonl", [])
    data |= {"test_source": [str(tmp_path / name) for name in data["test_source"]]}
    with pytest.raises(SteadytrainError, match=named):
        run(configure(folder, **data))


def test_a_split_whose_records_are_all_defective_is_an_error(
    configure: Configure, tmp_path: Path
) -> None:
    (folder,) = lines(tmp_path / "set")
    write_jsonl(folder / "test.jsonl", [{"text": ""}] * 3)
    with pytest.raises(DataError, match=r"test side of the split is empty.*3 def") as error:
        run(configure(folder, max_bad_share=0.1))
    assert "data.splits to pool" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *(("train", "train"), ("imdb-train", "train"), ("training_set", "train")),
        *(("test-00000-of-00002", "test"), ("test_sft", "test"), ("test2", "test")),
        *(("data.dev", "validation"), ("validation-00000-of-00001-0123456789abcdef", "validation")),
        *(("train-test", None), ("latest", None), ("all", None), ("contest", None), ("", None)),
    ],
)
def test_names_of_splits(name: str, side: Side | None) -> None:
    assert side_of_split(name) == side
    assert side_of_file(PurePosixPath(f"{name}.jsonl.gz"), ".jsonl") == side
    assert side_of_file(PurePosixPath("dev", f"{name}.csv"), ".csv") == (side or "validation")


def test_a_folder_that_all_files_share_names_no_side(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test" / "one" / "0.jsonl", TEST)
    write_jsonl(tmp_path / "test" / "two" / "0.jsonl", TRAIN)
    (tmp_path / "test" / "two" / "dev").mkdir()
    (tmp_path / "test" / "two" / "dev" / "test.py").write_text("print()")
    for source in (["test"], ["test/one", "test/two"], ["test/one/0.jsonl", "test/two/0.jsonl"]):
        data = DataConfig(source=[str(tmp_path / each) for each in source])
        assert find_inputs(data).given == {}
    assert find_inputs(DataConfig(source=[str(tmp_path)], format="source")).given == {}


@pytest.mark.parametrize("place", ["set", "set/*/*.jsonl", "set/**/*.jsonl"])
def test_a_set_with_nothing_but_a_test_folder_says_so(
    configure: Configure, tmp_path: Path, place: str
) -> None:
    write_jsonl(tmp_path / "set" / "test" / "0.jsonl", TRAIN)
    prepared = run(configure(tmp_path / place))
    (warning,) = card(prepared)["warnings"]
    assert warning.startswith("data.source has a test split of 60 records, and no other records")


def test_files_that_two_addresses_name_are_counted(tmp_path: Path) -> None:
    (folder,) = lines(tmp_path / "set")
    data = DataConfig(source=[str(folder), str(folder / "train.jsonl")])
    assert find_inputs(data).left_out == {"files that another address names too": 1}
