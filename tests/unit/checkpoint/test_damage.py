"""Damage is found and named before a checkpoint is loaded, and the previous one is used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil

import pytest

from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.storage import LocalStorage, local
from steadytrain.components.train.checkpoint import (
    CheckpointDamaged,
    CheckpointStore,
    newest,
)
from steadytrain.components.train.checkpoint.manifest import COMMIT, DAMAGED

from support.checkpoints import flip, names, save, shifted


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


def swap(path):
    """Replace a file with the same file from the previous checkpoint."""
    (other,) = path.parents[1].glob(f"step-00000001/{_kind(path.name)}")
    shutil.copyfile(other, path)


def loop(path):
    path.unlink()
    path.symlink_to(path)


def dangle(path):
    """Replace a file with a link to a disk that is gone."""
    path.unlink()
    path.symlink_to("/gone/file")


def _kind(name):
    """Return a pattern that matches this file in any save."""
    return name if name == COMMIT else "*-" + name.partition("-")[2]


@pytest.mark.parametrize("damage", [flip, truncate, remove, swap, loop, dangle])
@pytest.mark.parametrize(
    "file",
    [
        "*-rank-0000.model.safetensors",
        "*-rank-0001.optimizer.safetensors",
        "*-rank-0001.json",
        "*-state.json",
        "*-manifest.json",
        COMMIT,
    ],
)
def test_damaged_checkpoint_is_reported_set_aside_and_the_previous_one_used(
    folder, caplog, file, damage
):
    store = CheckpointStore(folder, keep=2)
    save(store, 1, world_size=2)
    save(store, 2, parts=shifted(1), world_size=2)
    (path,) = (folder / "step-00000002").glob(file)
    damage(path)

    with caplog.at_level(logging.WARNING):
        found = newest(folder)

    assert found == store.path(1)
    assert names(folder) == ["step-00000001"]
    uncommitted = file == COMMIT and damage in (remove, loop, dangle)
    # Only COMMIT describes the manifest, so with a bad COMMIT the log may name either file.
    named = "step-00000002/" if file == COMMIT else str(path)
    assert uncommitted or named in caplog.text
    assert uncommitted or "checkpoint file" in (path.parent / DAMAGED).read_text()


@pytest.mark.parametrize("damage", [truncate, remove])
def test_missing_or_short_file_is_found_without_reading_the_checkpoint(store, damage):
    save(store, 1)
    save(store, 2)
    storage = store.path(2).storage
    name = next(name for name in storage.list() if name.endswith(".model.safetensors"))
    content = storage.read(name)
    storage.delete(name)
    if damage is truncate:
        storage.write(name, content[:-1])

    assert newest(store.storage.uri, read=False) == store.path(1)
    assert names(store.storage.uri) == ["step-00000001"]


@pytest.mark.parametrize("damage", [loop, dangle])
def test_link_to_nothing_is_found_without_reading_the_checkpoint(folder, damage):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    save(store, 2)
    (path,) = (folder / "step-00000002").glob("*.model.safetensors")
    damage(path)
    assert newest(folder, read=False) == store.path(1)
    assert names(folder) == ["step-00000001"]


def test_flipped_bit_is_found_only_when_the_tensor_is_read(folder):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    save(store, 2)
    flip(next((folder / "step-00000002").glob("*.model.*")))

    found = newest(folder, read=False)

    assert found == store.path(2)
    with pytest.raises(CheckpointDamaged, match="its content has changed"):
        found.tensors("model")
    assert newest(folder) == store.path(1)


def test_damaged_checkpoint_stays_until_its_step_is_saved_again(folder):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    save(store, 2)
    flip(next((folder / "step-00000002").glob("*.model.*")))
    newest(folder)
    store.retain(save(store, 3), best_step=0)
    assert (folder / "step-00000002" / DAMAGED).is_file()

    manifest = save(store, 2, parts=shifted(1))
    store.retain(manifest, best_step=3)

    assert {path.name for path in (folder / "step-00000002").iterdir()} == manifest.names


@pytest.mark.slow
def test_damage_in_an_s3_object_is_found(store, address):
    if not address.startswith("s3"):
        return
    save(store, 1)
    save(store, 2)
    storage = store.path(2).storage
    name = next(name for name in storage.list() if name.endswith(".model.safetensors"))
    storage.write(name, storage.read(name)[:-1] + b"?")

    assert newest(address) == store.path(1)
    assert names(address) == ["step-00000001"]


def test_stale_manifest_is_rejected(folder):
    """An older checkpoint's COMMIT over newer files, and an older checkpoint under a newer name."""
    store = CheckpointStore(folder, keep=9)
    save(store, 1)
    save(store, 2)
    shutil.copyfile(folder / "step-00000001" / COMMIT, folder / "step-00000002" / COMMIT)
    shutil.copytree(folder / "step-00000001", folder / "step-00000003")

    with pytest.raises(CheckpointDamaged, match=r"manifest\.json: is missing"):
        store.path(2).verify()
    with pytest.raises(CheckpointDamaged, match="is from step 1"):
        store.path(3).verify()


def test_other_format_versions_are_rejected(folder):
    """In version 1, COMMIT held only a digest. The version counts only if its digest matches."""
    store = CheckpointStore(folder, keep=9)
    old = folder / "step-00000001"
    old.mkdir(parents=True)
    (old / "manifest.json").write_text(json.dumps({"schema_version": 1, "step": 1}))
    digest = hashlib.sha256((old / "manifest.json").read_bytes()).hexdigest()
    (old / COMMIT).write_text(digest)

    with pytest.raises(BadInput, match="schema version 1; this steadytrain reads 2 and 3"):
        newest(folder)
    (old / "manifest.json").write_text(json.dumps({"schema_version": 7, "step": 1}))
    assert newest(folder) is None
    save(store, 2)
    assert newest(folder) == store.path(2)


def test_unreadable_file_does_not_count_as_damage(folder, monkeypatch):
    store = CheckpointStore(folder, keep=9)
    save(store, 1)

    def denied(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(local, "open_regular", denied)  # root can read everything
        with pytest.raises(StorageError, match="COMMIT: Permission denied"):
            newest(folder)
    assert newest(folder) == store.path(1)


def break_reads(path):
    """Make reads of the file fail with EIO, as on a broken disk."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (break_reads, "Input/output error"),
        (make_pipe, "Not a regular file"),
        (make_folder, "Is a directory"),
    ],
)
@pytest.mark.parametrize("file", ["*-rank-0000.model.safetensors", "*-manifest.json", COMMIT])
def test_read_error_counts_as_damage_and_the_previous_checkpoint_is_used(
    folder, caplog, file, harm, said
):
    store = CheckpointStore(folder, keep=9)
    save(store, 1)
    save(store, 2)
    (path,) = (folder / "step-00000002").glob(file)
    harm(path)
    with caplog.at_level(logging.WARNING):
        assert newest(folder) == store.path(1)
    a_folder_is_no_commit = file == COMMIT and harm is make_folder
    assert a_folder_is_no_commit or (said in caplog.text and str(path) in caplog.text)


def test_older_checkpoint_is_used_even_if_the_damage_cannot_be_marked(folder, caplog, monkeypatch):
    """This happens in a bucket without delete permission or on a disk that became read-only."""
    store = CheckpointStore(folder, keep=9)
    save(store, 1)
    save(store, 2)
    break_reads(next((folder / "step-00000002").glob("*.model.safetensors")))

    def refused(self, name):
        raise StorageError(f"cannot delete {name}")

    monkeypatch.setattr(LocalStorage, "delete", refused)
    with caplog.at_level(logging.WARNING):
        assert newest(folder) == store.path(1)
    assert "skipped, but could not be set aside" in caplog.text


def test_other_folders_are_left_alone(folder):
    store = CheckpointStore(folder, keep=1)
    notes = folder / "step-notes" / COMMIT
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    (folder / "step-plan").mkdir()
    store.begin()
    store.retain(save(store, 1), best_step=1)
    assert newest(folder) == store.path(1)
    assert notes.is_file()
    assert (folder / "step-plan").is_dir()


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "..", "a/b", "a\\b", ""])
@pytest.mark.parametrize("where", ["commit", "name", "file", "state", "rank", "slice"])
def test_name_in_a_manifest_never_leads_out_of_its_folder(tmp_path, where, name):
    """Anyone who can write to the bucket can also write matching digests."""
    address = tmp_path / "checkpoints"
    store = CheckpointStore(address, keep=9)
    save(store, 1)
    save(store, 2)
    folder = address / "step-00000002"
    path = next(folder.glob("*-manifest.json"))
    manifest = json.loads(path.read_bytes())
    if where == "name":
        manifest["name"] = name
    elif where == "file":
        manifest["files"][0]["name"] = name
    elif where == "state":
        manifest["state"] = name
    elif where == "rank":
        manifest["ranks"][0] = name
    elif where == "slice":
        manifest["tensors"][0]["slices"][0]["file"] = name
    content = json.dumps(manifest).encode()
    path.write_bytes(content)
    named = name if where == "commit" else path.name
    (folder / COMMIT).write_text(f"{hashlib.sha256(content).hexdigest()}  {named}\n")

    with pytest.raises(CheckpointDamaged):
        store.path(2).verify()
    assert newest(address).step == 1


def test_other_folders_are_not_listed(tmp_path):
    save(CheckpointStore(tmp_path, keep=9), 1)
    for name in ("step-latest", "step-", "step-1", "step-0000000x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMMIT).write_text("")
    assert names(tmp_path) == ["step-00000001"]
