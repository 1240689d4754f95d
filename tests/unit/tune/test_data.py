"""The data that trials share leave out the test side, in the record and in its folder."""

from __future__ import annotations

import pytest

from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.paths import UnsafeName
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tune.trials.folder import (
    TrialFolder,
    data_path,
    known_data,
    without_test,
)

from support.odd import call


@pytest.mark.parametrize("place", ["", "studies/My Search/trials/0003"])
def test_trial_of_a_study_is_not_adjusted(tmp_path, place):
    trial = TrialFolder(tmp_path / "studies" / "My Search", 3)
    trial.path.mkdir(parents=True)
    words = ("--set", "training.learning_rate=1e-5", "--output", str(tmp_path / place))
    done = call("adjust", trial.run, *words, folder=tmp_path)
    assert done.code == 2
    assert "is trial 3 of the study My Search" in done.err
    assert "tune.space" in done.err
    other = call("adjust", "other", *words, folder=tmp_path)
    assert "run 'other': not in" in other.err


CONTENT = {
    "name": "tiny",
    "data": {"source": ["unused"]},
    "model": {"config": {"model_type": "llama"}},
}


@pytest.fixture
def whole(tmp_path):
    """Return prepared data with three sides."""
    folder = tmp_path / "whole"
    names = ("train", "validation", "test")
    for name in (
        *names,
        "index/train",
        "index/test",
        "tokenizer/tokenizer.json",
        "records",
        "columns.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return DataRecord(
        folder=str(folder),
        fingerprint="f",
        task="causal_lm",
        sides={
            name: SideRecord(
                shards=[name],
                rows=1,
                documents=1,
                index=f"index/{name}" if name != "validation" else "",
            )
            for name in names
        },
        test_records="records",
        split_digest="s",
        tokenizer="tokenizer",
    )


def test_neither_the_record_nor_its_folder_leads_to_the_test_side(whole, tmp_path):
    closed = without_test(whole, tmp_path / "closed")
    assert closed.fingerprint == whole.fingerprint
    assert closed.sides.keys() == {"train", "validation"}
    files = {path.name for path in (tmp_path / "closed").rglob("*") if path.is_file()}
    assert files == {"train", "validation", "tokenizer.json", "columns.json"}
    for name in ("train", "validation", "index/train", "tokenizer/tokenizer.json"):
        assert closed.path(name).samefile(whole.path(name))
    with pytest.raises(UnsafeName):
        judged_records(from_mapping(CONTENT), closed)


def test_what_an_interrupted_process_left_is_replaced(whole, tmp_path):
    (tmp_path / "closed" / "test").mkdir(parents=True)
    closed = without_test(whole, tmp_path / "closed")
    assert not closed.path("test").exists()


def test_trials_share_data_if_their_data_and_models_are_equal(tmp_path):
    def of(**sections):
        return data_path(tmp_path, from_mapping(CONTENT | sections))

    assert of() == of(training={"learning_rate": 0.1}, run="other", output="elsewhere")
    assert of() != of(data={"source": ["unused"], "sequence_length": 64})


def test_data_that_were_removed_are_prepared_again(whole, tmp_path):
    config = from_mapping(CONTENT)
    assert known_data(tmp_path, config) is None
    path = data_path(tmp_path, config)
    closed = without_test(whole, path.with_suffix(""))
    closed.save(path)
    assert known_data(tmp_path, config) == closed
    path.with_suffix("").rename(tmp_path / "moved")
    assert known_data(tmp_path, config) is None
