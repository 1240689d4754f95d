"""Temporary S3 failures are retried, missing features are refused, and nothing is half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid

import pytest

from steadytrain.components.shared.append_log import ObjectLog
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.lease import lock
from steadytrain.components.shared.storage import S3Storage, open_storage, s3

from support.command import wait_for
from support.selected import each

FAULTS = ["500", "503", "reset", "hang", "lose", "truncate"]
FEW = ("503", "lose")
LARGE = 9 << 20
"""Size in bytes of a file that is uploaded and downloaded in parts."""


@pytest.fixture
def storage(proxy):
    return open_storage(f"s3://bucket/{uuid.uuid4().hex}")


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


@each("fault", FAULTS, FEW)
def test_each_operation_is_retried_until_it_succeeds(storage, proxy, fault):
    def through(operation, *arguments, **options):
        proxy.queued.extend([fault] * (1 if fault == "hang" else 2))
        found = operation(*arguments, **options)
        proxy.queued.clear()
        return found

    assert through(storage.write, "one", b"content")
    assert through(storage.write, "two", b"content", if_absent=True)
    assert not through(storage.write, "two", b"other", if_absent=True)
    assert through(storage.read, "two") == b"content"
    parts = lambda: iter([b"con", b"tent"])  # noqa: E731
    through(storage.write_stream, "one", parts())
    assert through(lambda: b"".join(storage.read_stream("one"))) == b"content"
    assert through(storage.exists, "one")
    assert not through(storage.exists, "three")
    assert through(storage.list) == ["one", "two"]
    through(storage.delete, "one")
    assert storage.list() == ["two"]
    with pytest.raises(FileNotFoundError):
        through(storage.read, "one")


@pytest.mark.slow
@each("fault", FAULTS, FEW)
def test_files_survive_faults_in_multipart_transfers(storage, proxy, large, tmp_path, fault):
    times = 1 if fault == "hang" else 3
    proxy.queued.extend([fault] * times)
    storage.upload(large, "large")
    proxy.queued.clear()
    proxy.queued.extend([fault] * times)
    storage.download("large", tmp_path / "there" / "large")
    assert (tmp_path / "there" / "large").read_bytes() == large.read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["large"]


@each("fault", FAULTS, FEW)
def test_streams_survive_faults(storage, proxy, large, fault):
    content = large.read_bytes()
    times = 1 if fault == "hang" else 3
    proxy.queued.extend([fault] * times)
    storage.write_stream("large", (content[: LARGE // 3], content[LARGE // 3 :]))
    proxy.queued.clear()
    proxy.queued.extend([fault] * times)
    assert b"".join(storage.read_stream("large")) == content


@each("fault", ["500", "503", "reset", "hang"], FEW)
def test_lasting_faults_are_reported_by_name(storage, proxy, large, tmp_path, fault, monkeypatch):
    storage.write("kept", b"before")
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    monkeypatch.setattr(s3, "READ_SECONDS", 0.2)
    storage = open_storage(storage.uri)
    proxy.usual = fault
    for attempt in (
        lambda: storage.write("kept", b"after"),
        lambda: storage.write("new", b"x", if_absent=True),
        lambda: storage.read("kept"),
        lambda: storage.exists("kept"),
        lambda: storage.delete("kept"),
        lambda: storage.upload(large, "kept"),
        lambda: storage.download("kept", tmp_path / "there" / "kept"),
    ):
        with pytest.raises(StorageError, match=f"{storage.uri}/(kept|new)") as caught:
            attempt()
        fix = "the server is overloaded" if fault in ("500", "503") else "AWS_ENDPOINT_URL,"
        assert fix in caught.value.remedy, "the name in the documentation"
    assert not list((tmp_path / "there").iterdir())
    proxy.usual = "forward"
    monkeypatch.setattr(s3, "READ_SECONDS", 300.0)
    storage = open_storage(storage.uri)
    assert storage.list() == ["kept"]
    assert storage.read("kept") == b"before"


def test_body_that_is_always_truncated_is_reported(storage, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    storage.write("name", b"content")
    proxy.usual = "truncate"
    with pytest.raises(StorageError, match=f"{storage.uri}/name"):
        storage.read("name")
    with pytest.raises(StorageError, match=f"{storage.uri}/name"):
        storage.download("name", tmp_path / "there" / "name")
    assert not list((tmp_path / "there").iterdir())


def test_lost_permission_is_reported_at_once(storage, proxy, large):
    storage.write("kept", b"before")
    proxy.usual = "403"
    for attempt in (
        lambda: storage.write("kept", b"after"),
        lambda: storage.read("kept"),
        lambda: storage.exists("kept"),
        lambda: storage.upload(large, "kept"),
    ):
        proxy.seen.clear()
        with pytest.raises(StorageError, match=f"{storage.uri}/kept: (AccessDenied|403)") as caught:
            attempt()
        assert "AWS_ACCESS_KEY_ID" in caught.value.remedy
        assert len(proxy.seen) == 1
    proxy.usual = "forward"
    assert storage.read("kept") == b"before"


def test_unknown_server_is_rejected(credentials, monkeypatch):
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="s3://bucket/x/name"):
        S3Storage("s3://bucket/x").read("name")


def test_missing_credentials_are_reported(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(StorageError) as caught:
        S3Storage("s3://bucket/x").read("name")
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


TRANSFER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from steadytrain.components.shared.storage import open_storage\n"
    "storage = open_storage(sys.argv[2])\n"
    "getattr(storage, sys.argv[1])(*[Path(a) if '/' in a else a for a in sys.argv[3:]])\n"
)


def killed_in(proxy, *arguments, after):
    """Kill a transfer after `after` requests were answered and the next ones hang."""
    proxy.seen.clear()
    proxy.queued.extend(["forward"] * after)
    proxy.usual = "hang"
    process = subprocess.Popen([sys.executable, "-c", TRANSFER, *map(str, arguments)])
    wait_for(lambda: len(proxy.seen) > after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.usual = "forward"
    proxy.queued.clear()


@pytest.mark.slow
def test_killed_upload_is_never_visible(storage, proxy, large, tmp_path):
    storage.write("name", b"before")
    killed_in(proxy, "upload", storage.uri, large, "name", after=2)
    assert any("uploads" in seen or "uploadId" in seen for seen in proxy.seen)
    assert storage.read("name") == b"before"
    storage.upload(large, "name")
    storage.download("name", tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == large.read_bytes()


@pytest.mark.slow
def test_download_that_is_killed_leaves_nothing_behind(storage, proxy, large, tmp_path):
    storage.upload(large, "name")
    target = tmp_path / "there" / "name"
    killed_in(proxy, "download", storage.uri, "name", target, after=2)
    assert not target.exists()
    storage.download("name", target)
    assert target.read_bytes() == large.read_bytes()


def test_one_writer_wins_if_responses_are_lost(storage, proxy):
    proxy.concerns = lambda method, _path: method == "PUT"
    for turn in range(3):
        proxy.queued.extend(["lose"] * 4)
        won = []

        def write(number, turn=turn, won=won):
            if storage.write(f"{turn}", b"the same of all", if_absent=True):
                won.append(number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


@pytest.mark.slow
def test_log_holds_each_record_once_if_responses_are_lost(storage, proxy):
    proxy.concerns = lambda method, _path: method == "PUT"
    log, records = ObjectLog(storage), [{"step": 1}, {"step": 2}]
    for record in records:
        proxy.queued.append("lose")
        log.append(record)
    assert not proxy.queued
    assert ObjectLog(storage).read() == records


def test_lock_is_held_and_released_if_its_response_is_lost(storage, proxy):
    proxy.concerns = lambda method, path: method == "PUT" and "lock" in path
    for _ in range(2):
        proxy.queued.append("lose")
        with lock(storage.uri, "x", wait_seconds=0) as check:
            check()


def test_server_without_conditional_writes_is_rejected(storage, proxy, monkeypatch):
    monkeypatch.setattr(S3Storage, "_conditional", set())
    proxy.hidden.add("if-none-match")
    with pytest.raises(BadInput, match="If-None-Match"):
        storage.require_conditional_writes()
    assert storage.list() == []
    proxy.hidden.clear()
    storage.require_conditional_writes()
    proxy.seen.clear()
    open_storage(storage.uri).require_conditional_writes()
    assert proxy.seen == []
