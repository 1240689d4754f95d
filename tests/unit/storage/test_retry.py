"""Calls are retried only if a retry can help, and not for too long."""

import errno
import itertools
import os
import types

import pytest

from steadytrain.components.shared import retry
from steadytrain.components.shared.errors import PathTaken, ServerError, StorageError, Unreadable
from steadytrain.components.shared.storage.local import LocalStorage, local_errors


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retry, "DELAYS", (0.001, 0.001))


def tries(folder, number, seconds=0.1):
    """Return how often a write that fails with an error number is tried."""
    tried = []

    def write():
        tried.append(number)
        with local_errors("write", folder / "entry"):
            raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError):
        retry.retry_storage(write, seconds)
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
        retry.retry_storage(lambda: LocalStorage(tmp_path).write("entry", b""), 3600)


def test_unreadable_content_is_an_error_at_once():
    def read():
        raise Unreadable("a broken disk")

    with pytest.raises(Unreadable):
        retry.retry_storage(read, 3600)


class Denied(ServerError):
    denied = True


AWAY, DENIED, WRONG = ServerError("away", passing=True), Denied("denied"), ServerError("wrong")


class Server:
    """A server that fails as told, then answers, on a clock that only waits move."""

    def __init__(self, monkeypatch, errors):
        self.errors, self.now, self.waits, self.reports = iter(errors), 0.0, [], []
        monkeypatch.setattr(retry, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(retry, "DELAYS", (1.0, 4.0))

    def wait(self, seconds):
        self.now += seconds
        self.waits.append(seconds)

    def __call__(self):
        if error := next(self.errors, None):
            raise error
        return "answer"


@pytest.mark.parametrize(
    ("errors", "options", "waits", "raised"),
    [
        ([], {}, [], None),
        ([AWAY] * 5, {}, [1, 2, 4, 4, 4], None),
        ([WRONG], {}, [], WRONG),
        ([AWAY, WRONG], {}, [1], WRONG),
        ([AWAY] * 5, {"seconds": 5}, [1, 2, 2], AWAY),
        ([AWAY], {"seconds": 0}, [], AWAY),
        ([AWAY] * 5, {"tries": 3}, [1, 2], AWAY),
        ([DENIED] * 9, {"denied_seconds": 2}, [1, 1], DENIED),
        ([DENIED] * 9, {"seconds": 1}, [1], DENIED),
        # Each absence gives the server time to deny requests again.
        ([DENIED, AWAY, DENIED, AWAY], {"denied_seconds": 2}, [1, 2, 2, 4], None),
    ],
)
def test_call_is_repeated_until_the_error_is_permanent_or_lasts(
    monkeypatch, errors, options, waits, raised
):
    server = Server(monkeypatch, errors)
    options |= {"wait": server.wait, "report": server.reports.append}
    if raised:
        with pytest.raises(ServerError) as caught:
            retry.retry(server, **options)
        assert caught.value is raised
    else:
        assert retry.retry(server, **options) == "answer"
    assert server.waits == waits
    assert server.reports == [error.message for error in errors[:1] if waits]


def test_each_outage_is_reported_once_and_has_its_own_time(monkeypatch):
    server = Server(monkeypatch, [AWAY, AWAY, None, AWAY, AWAY])
    repeat = retry.Retry(seconds=4, wait=server.wait, report=server.reports.append)
    assert [repeat(server), repeat(server)] == ["answer"] * 2
    assert (server.waits, server.reports) == ([1, 2, 1, 2], ["away", "away"])


def test_outage_lasts_over_several_calls(monkeypatch):
    server = Server(monkeypatch, itertools.repeat(AWAY))
    repeat = retry.Retry(seconds=3, wait=server.wait)
    for waits in ([1, 2], [1, 2]):
        with pytest.raises(ServerError):
            repeat(server)
        assert server.waits == waits


def test_caller_with_a_loop_of_its_own_sees_when_the_next_try_is_due(monkeypatch):
    server = Server(monkeypatch, [])
    repeat = retry.Retry(transient=retry.any_error, seconds=retry.FOREVER)
    assert repeat.due
    for delay in (1, 2, 4, 4):
        assert repeat.may_pass(WRONG)
        server.now += delay - 0.5
        assert not repeat.due
        server.now += 0.5
        assert repeat.due
