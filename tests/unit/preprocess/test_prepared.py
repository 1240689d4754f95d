"""Runs share prepared data, which never change, whatever other processes do meanwhile."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess import prepared
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.loop.data import Rows

from support.data import texts, write_jsonl
from support.preparing import start

EXPIRED = {"reuse_ttl_seconds": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "x.jsonl", texts(150))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def names(config: RunConfig) -> list[str]:
    return sorted(item.name for item in Workspace.of(config).prepared.iterdir())


@pytest.mark.slow
def test_concurrent_steps_of_one_run_agree(path: Path, configure: Any) -> None:
    config = configure(path, run_name="one", recovery=EXPIRED)
    steps = [start(config) for _ in range(2)]
    for step in steps:
        step.join()
    assert [step.exitcode for step in steps] == [0, 0]
    record = DataRecord.load(Workspace.of(config).record("preprocess"))
    assert names(config) == [record.fingerprint]
    alone = run(configure(path, run_name="two", recovery=EXPIRED))
    assert digests(Path(record.folder)) == digests(Path(alone.folder))


def test_second_run_leaves_open_data_alone(path: Path, configure: Any) -> None:
    first = run(configure(path, run_name="one", recovery=EXPIRED))
    shards = [first.path(name) for name in first.sides["train"].shards]
    rows, inodes = Rows(shards), [file.stat().st_ino for file in shards]
    second = run(configure(path, run_name="two", recovery=EXPIRED))
    assert second == first
    # A restarted attempt opens the files again and reads the same rows.
    assert [file.stat().st_ino for file in shards] == inodes
    assert len(Rows(shards)) == len(rows)
    assert rows[0]["input_ids"].tolist() == Rows(shards)[0]["input_ids"].tolist()


def test_damaged_data_stay_in_place(path: Path, configure: Any) -> None:
    """A process that has them open may still read the parts that are intact."""
    config = configure(path)
    first = run(config)
    first.path("card.json").write_text("{}")
    second, third = run(config), run(config)
    assert second == third
    assert Path(second.folder).name == f"{first.fingerprint}-2"
    assert first.path("card.json").read_text() == "{}"
    assert names(config) == [first.fingerprint, f"{first.fingerprint}-2"]


@pytest.mark.slow
def test_next_step_cleans_up_after_a_kill(path: Path, configure: Any) -> None:
    expected = digests(Path(run(configure(path, run_name="undisturbed")).folder))
    seen: set[str] = set()
    # A fast step may end before it is killed.
    for number in itertools.count():
        other = configure(path, run_name=f"run-{number}", recovery=EXPIRED, split_salt=str(number))
        step = start(other)
        while step.is_alive() and not any(name.startswith(".partial") for name in names(other)):
            time.sleep(0.001)
        time.sleep(0.05 * (number % 4))
        step.kill()
        step.join()
        seen |= {name.split("-")[0] for name in names(other)}
        run(configure(path, run_name=f"next-{number}", recovery=EXPIRED))
        assert not [name for name in names(other) if name.startswith(".")]
        for folder in Workspace.of(other).prepared.iterdir():
            assert (folder / "card.html").is_file(), "published in part"
        if number >= 3 and ".partial" in seen:
            break
    again = run(configure(path, run_name="last", recovery=EXPIRED))
    assert digests(Path(again.folder)) == expected


def test_scratch_folder_in_use_is_no_leftover(tmp_path: Path) -> None:
    with prepared.scratch(tmp_path, "one") as first, prepared.scratch(tmp_path, "one") as second:
        assert first != second
        assert first.is_dir()
        assert not list(prepared.leftovers(tmp_path, idle_seconds=0))
    assert not list(tmp_path.iterdir())


def test_unlocked_scratch_folder_is_removed_and_recreated_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed before it makes the lock, or after it removes it, leaves such a folder."""
    (tmp_path / f"{prepared.PARTIAL}killed").mkdir()
    (tmp_path / f"{prepared.PARTIAL}half").mkdir()
    (tmp_path / f"{prepared.PARTIAL}half" / "lock.new").touch()
    make, made = prepared.tempfile.mkdtemp, list[str]()

    def taken(**given: Any) -> str:
        found = make(**given)
        made.append(found)
        if len(made) == 1:
            with prepared.scratch(tmp_path, "other"):
                pass
        return found

    monkeypatch.setattr(prepared.tempfile, "mkdtemp", taken)
    with prepared.scratch(tmp_path, "one") as folder:
        assert len(made) == 3
        assert [item.name for item in tmp_path.iterdir()] == [folder.name]
        assert (folder / "lock").is_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lock", ["", "another machine"])
def test_only_old_scratch_folders_of_other_machines_are_leftovers(
    tmp_path: Path, lock: str
) -> None:
    left = tmp_path / f"{prepared.PARTIAL}one-x"
    left.mkdir()
    if lock:
        (left / "lock").write_text(lock)
    assert not list(prepared.leftovers(tmp_path, idle_seconds=60))
    then = time.time() - 100
    for place in (*left.iterdir(), left):
        os.utime(place, (then, then))
    assert list(prepared.leftovers(tmp_path, idle_seconds=60)) == [left]
