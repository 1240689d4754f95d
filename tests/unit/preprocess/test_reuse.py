from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFinished
from steadytrain.components.shared.workspace import Workspace

from support.data import texts, write_jsonl


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "x.jsonl", texts(60))


def reused(config: Any) -> bool:
    """Run, and return whether earlier outputs were reused."""
    run(config)
    last = read_events(Workspace.of(config).events)[-1]
    assert isinstance(last, StepFinished)
    return last.reused


def test_another_run_reuses_the_data(path: Path, configure: Any) -> None:
    assert not reused(configure(path, run_name="one"))
    assert reused(configure(path, run_name="two"))
    assert Workspace.of(configure(path, run_name="two")).record("preprocess").is_file()


def test_unrelated_settings_keep_the_data(path: Path, configure: Any) -> None:
    config = configure(path)
    assert not reused(config)
    training = config.training.model_copy(update={"learning_rate": 1.0})
    assert reused(config.model_copy(update={"training": training, "run": "other"}))


def test_expired_data_are_reused_only_by_their_own_run(path: Path, configure: Any) -> None:
    expired = {"reuse_ttl_seconds": 0}
    assert not reused(configure(path, run_name="one", recovery=expired))
    assert reused(configure(path, run_name="one", recovery=expired))
    assert not reused(configure(path, run_name="two", recovery=expired))


@pytest.mark.parametrize("hidden", ["entry", "file"])
def test_unreadable_data_are_prepared_again(path: Path, configure: Any, hidden: str) -> None:
    """A link to itself can't be opened, even by root, so it acts like another user's file."""
    config = configure(path)
    record = run(config)
    (entry,) = (Workspace.of(config).output / "reuse" / "preprocess").iterdir()
    place = entry if hidden == "entry" else record.path("card.json")
    place.unlink()
    place.symlink_to(place.name)
    assert not reused(config)
    assert reused(config)


@pytest.mark.parametrize(
    "name", ["train/shard-00000.arrow", "tokenizer/tokenizer.json", "card.json"]
)
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damaged_data_are_prepared_again(
    path: Path, configure: Any, name: str, damage: str
) -> None:
    record = run(configure(path))
    file = record.path(name)
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert not reused(configure(path))
    again = run(configure(path))
    assert again.path(name).read_bytes() == content
    assert again.fingerprint == record.fingerprint
    assert again.folder != record.folder


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 64},
        {"split_salt": "x"},
        {"model": {"config": {"model_type": "gpt2"}, "vocab_size": 350}},
    ],
)
def test_change_that_affects_the_data_prepares_them_again(
    path: Path, configure: Any, change: dict[str, Any]
) -> None:
    before = run(configure(path))
    after = configure(path, **change)
    assert not reused(after)
    assert run(after).fingerprint != before.fingerprint


def test_new_content_prepares_the_data_again(path: Path, configure: Any) -> None:
    assert not reused(configure(path, run_name="one"))
    write_jsonl(path, texts(61))
    assert not reused(configure(path, run_name="one"))
