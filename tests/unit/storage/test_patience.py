"""Writes are retried only if a retry can help."""

import errno
import os

import pytest

from steadytrain.components.shared import patience
from steadytrain.components.shared.errors import PathTaken, StorageError, Unreadable
from steadytrain.components.shared.storage.local import LocalStorage, local_errors


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(patience, "_REFUSED_DELAY", 0.001)


def tries(folder, number, seconds=0.1):
    """Return how often a write that fails with an error number is tried."""
    tried = []

    def write():
        tried.append(number)
        with local_errors("write", folder / "entry"):
            raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError):
        patience.retry_rejected(write, seconds)
    return len(tried)


@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "EISDIR", "ENOTDIR"])
def test_write_that_no_retry_helps_is_tried_once(tmp_path, name):
    assert tries(tmp_path, getattr(errno, name)) == 1


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "ETIMEDOUT"])
def test_write_that_storage_rejects_for_a_moment_is_retried(tmp_path, name):
    assert tries(tmp_path, getattr(errno, name)) > 1


def test_folder_in_place_of_a_file_is_an_error_at_once(tmp_path):
    (tmp_path / "entry").mkdir()
    with pytest.raises(PathTaken):
        patience.retry_rejected(lambda: LocalStorage(tmp_path).write("entry", b""), 3600)


def test_unreadable_content_is_an_error_at_once():
    def read():
        raise Unreadable("a broken disk")

    with pytest.raises(Unreadable):
        patience.retry_rejected(read, 3600)
