"""What another program or another run wrote is never taken for a checkpoint, nor removed."""

from __future__ import annotations

import shutil
from threading import Event

import pytest

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.checkpoint import CheckpointStore, refuse_foreign


def save(folder, step, run, *, commit=True):
    """Write a checkpoint without tensors."""
    store = CheckpointStore(folder, keep=5, run=run)
    store.write_rank(step, "abc", 0, [], {})
    if commit:
        store.commit(step, "abc", 1, b"{}", given_up=Event())
    return store


@pytest.mark.parametrize("name", ["step-00000500", "checkpoint-500"])
def test_folder_of_another_program_is_refused_and_kept(tmp_path, name):
    weights = tmp_path / name / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    with pytest.raises(BadInput, match=rf"{name} was not written by steadytrain"):
        refuse_foreign(tmp_path, "mine", ())
    assert weights.read_bytes() == b"weights"


def test_file_in_the_place_of_a_checkpoint_is_refused_before_training_reaches_its_step(tmp_path):
    (tmp_path / "step-00000500").write_bytes(b"weights")
    with pytest.raises(BadInput, match="step-00000500 is a file"):
        refuse_foreign(tmp_path, "mine", ())


def test_checkpoint_of_another_run_is_refused_with_its_origin(tmp_path):
    save(tmp_path / "theirs", 500, "theirs")
    shutil.copytree(tmp_path / "theirs" / "step-00000500", tmp_path / "mine" / "step-00000500")
    with pytest.raises(BadInput, match="was written by run 'theirs'") as caught:
        refuse_foreign(tmp_path / "mine", "mine", ())
    assert "model.base" in caught.value.remedy


def test_own_checkpoints_and_leftovers_are_no_obstacle(tmp_path):
    save(tmp_path, 10, "mine")
    save(tmp_path, 20, "mine", commit=False)
    (tmp_path / "step-00000030").mkdir()
    # The state of a component (training.components) is a part of its own.
    for name in ("component-ema", "component-my-own.v2"):
        (tmp_path / "step-00000010" / f"abc-rank-0000.{name}.safetensors").write_bytes(b"")
    refuse_foreign(tmp_path, "mine", ())


def test_checkpoint_in_the_ledger_of_a_renamed_run_counts(tmp_path):
    checkpoint = save(tmp_path, 10, "old-name").path(10)
    refuse_foreign(tmp_path, "new-name", {checkpoint.label})
    refuse_foreign(tmp_path, "new-name", {checkpoint.name})
    with pytest.raises(BadInput, match="old-name"):
        refuse_foreign(tmp_path, "new-name", ())
