"""Folders and S3 behave the same."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from botocore.loaders import JSONFileLoader

from steadytrain.components.preprocess.sources import find_files
from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import BadInput, PathTaken, StorageError
from steadytrain.components.shared.model_source import package_folder
from steadytrain.components.shared.paths import UnsafeName, below
from steadytrain.components.shared.storage import LocalStorage, S3Storage, local, open_storage, s3
from steadytrain.components.shared.storage.base import Weight
from steadytrain.components.shared.storage.local import LIST, is_stored, write_texts
from steadytrain.components.train.checkpoint import CheckpointStore

from support.checkpoints import save
from support.disks import small_file_system
from support.s3 import make_bucket, mocked_s3


@pytest.fixture(params=["local", "s3", pytest.param("weed", marks=pytest.mark.slow)])
def storage(request, tmp_path, monkeypatch):
    if request.param == "local":
        yield open_storage(str(tmp_path / "root"))
        return
    if request.param == "weed":
        port = request.getfixturevalue("weed_port")
        make_bucket(port, "bucket")
        request.getfixturevalue("credentials")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        yield open_storage(f"s3://bucket/{uuid.uuid4().hex}/some/prefix")
        return
    with mocked_s3(monkeypatch):
        yield open_storage("s3://bucket/some/prefix")


def test_descriptions_of_the_service_are_read_for_the_first_address_only(credentials, monkeypatch):
    first = open_storage("s3://bucket/a").client
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda *_: pytest.fail("read again"))
    assert open_storage("s3://bucket/b").client is not first


def test_written_object_is_read_listed_and_deleted(storage):
    assert storage.write("a/one", b"1")
    assert storage.write("b", b"2")
    assert storage.read("a/one") == b"1"
    assert storage.list() == ["a/one", "b"]
    assert storage.list("a/") == ["a/one"]
    assert storage.exists("b")
    assert not storage.exists("a")
    storage.delete("b")
    storage.delete("b")
    assert storage.list() == ["a/one"]


def test_if_absent_writes_once(storage):
    assert storage.write("lock", b"first", if_absent=True)
    assert not storage.write("lock", b"second", if_absent=True)
    assert storage.read("lock") == b"first"
    assert storage.write("lock", b"third")
    assert storage.read("lock") == b"third"


def test_conditional_writes_can_be_relied_on(storage):
    storage.require_conditional_writes()
    assert storage.list() == []


@pytest.mark.slow
def test_missing_object_is_file_not_found(storage):
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")


def test_files_are_uploaded_and_downloaded(storage, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1 << 16))
    storage.upload(source, "deep/file")
    storage.download("deep/file", tmp_path / "there" / "file")
    assert (tmp_path / "there" / "file").read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_large_objects_are_transferred_in_parts(storage):
    parts = [os.urandom(5 << 20), b"", bytearray(b"x" * 7), memoryview(os.urandom(13 << 20))]

    storage.write_stream("deep/large", parts)

    whole = b"".join(parts)
    assert storage.read("deep/large") == whole
    received = list(storage.read_stream("deep/large"))
    assert b"".join(received) == whole
    assert len(received) > 1
    with pytest.raises(FileNotFoundError):
        list(storage.read_stream("nothing"))


@pytest.mark.parametrize("size", [0, 1, 8 << 20, 84 * 10**9, 85 * 10**9, 10**12, 5 << 40, 40 << 40])
def test_part_count_stays_within_the_limit(size):
    part = s3.part_bytes(size)
    assert 8 << 20 <= part <= 5 << 30
    # The size may be a tenth too low, for example if a file's header is left out.
    assert size * 1.1 / part <= 10_000
    assert part == 8 << 20 or size > 75 * 10**9


@pytest.mark.slow
def test_large_stream_is_uploaded_in_enough_parts(moto_storage, monkeypatch):
    """The real limit of 10,000 parts is out of reach here, so the test uses three."""
    monkeypatch.setattr(s3, "PARTS", 3)
    content = os.urandom(40 << 20)
    moto_storage.write_stream("large", [content], size=len(content))
    (item,) = moto_storage.describe()
    assert item.tag.strip('"').endswith("-3")
    assert moto_storage.read("large") == content


def test_storage_receives_the_size_of_a_snapshot(tmp_path, monkeypatch):
    told, write = [], LocalStorage.write_stream

    def noted(storage, name, parts, *, size=0):
        write(storage, name, parts, size=size)
        told.append((size, (storage.folder / name).stat().st_size))

    monkeypatch.setattr(LocalStorage, "write_stream", noted)
    parts = {"model": {"weight": torch.zeros(1 << 16)}}
    save(CheckpointStore(tmp_path, keep=1), 1, parts=parts)
    ((size, written),) = told
    assert size == 4 << 16
    assert size <= written <= size * 1.1


def test_only_the_given_folder_is_cleared(storage):
    for name in ("one/a", "one/b/c", "other/a", "beside"):
        storage.write(name, b"1")
    assert storage.folders() == ["one", "other"]

    storage.clear("one")
    storage.clear("nothing")

    assert storage.list() == ["beside", "other/a"]
    assert storage.folders() == ["other"]


def test_folder_size_is_reported(storage):
    began = time.time()
    assert storage.weigh() == Weight()
    storage.write("a/one", b"123")
    storage.write("a/b/two", b"4567")
    storage.write("ab/three", b"8")
    assert [storage.weigh(folder).bytes for folder in ("a", "a/b", "ab", "c", "")] == [
        7,
        4,
        1,
        0,
        8,
    ]
    # The server's clock has a resolution of one second.
    assert began - 1 < storage.weigh("a").newest <= time.time() + 1


def test_names_stay_below_a_prefix(storage):
    inner = storage.sub("x").sub("y")
    inner.write("name", b"content")
    assert storage.read("x/y/name") == b"content"
    assert inner.list() == ["name"]
    assert inner.uri == storage.uri + "/x/y"


def test_address_without_a_bucket_is_rejected():
    with pytest.raises(BadInput, match="names no bucket"):
        open_storage("s3:///prefix")


def test_missing_bucket_is_named(monkeypatch):
    with mocked_s3(monkeypatch), pytest.raises(StorageError, match="NoSuchBucket") as caught:
        S3Storage("s3://absent/x").write("a", b"b")
    assert "bucket that exists" in caught.value.remedy


def test_only_one_of_many_writers_wins(tmp_path):
    storage, won = LocalStorage(tmp_path), []
    threads = [
        threading.Thread(
            target=lambda n=n: storage.write("x", b"%d" % n, if_absent=True) and won.append(n)
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read("x") == b"%d" % won[0]


def test_file_permissions_follow_the_umask(tmp_path):
    storage = LocalStorage(tmp_path)
    before = os.umask(0o002)
    try:
        storage.write("team", b"x")
        os.umask(0o077)
        storage.write_stream("own", [b"x"])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"team": 0o664, "own": 0o600}


def test_write_beyond_the_disk_leaves_nothing(tmp_path):
    """A file-size limit makes the write fail halfway, like a full disk."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from steadytrain.components.shared.errors import StorageError\n"
        "from steadytrain.components.shared.storage import LocalStorage\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "storage = LocalStorage(Path(sys.argv[1]))\n"
        "storage.write('kept', b'before')\n"
        "try:\n"
        "    storage.write('kept', b'x' * 5000)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert "fix: raise the limit on the size of a file (`ulimit -f`)" in done.stdout
    assert (tmp_path / "kept").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    with small_file_system(tmp_path / "disk", "size=1m") as place:
        yield place


def test_full_disk_is_reported_and_keeps_existing_files(small_disk, tmp_path):
    storage = LocalStorage(small_disk)
    storage.write("kept", b"before")
    source = tmp_path / "source"
    source.write_bytes(bytes(2 << 20))
    for attempt in (
        lambda: storage.write("kept", bytes(2 << 20)),
        lambda: storage.write("new", bytes(2 << 20), if_absent=True),
        lambda: storage.upload(source, "kept"),
        lambda: LocalStorage(tmp_path).download("source", small_disk / "kept"),
    ):
        with pytest.raises(StorageError, match=f"cannot write {small_disk}/.*: No space") as caught:
            attempt()
        assert "free space" in caught.value.remedy
    assert [path.name for path in small_disk.iterdir()] == ["kept"]
    assert storage.read("kept") == b"before"
    assert storage.write("kept", b"after")


def test_download_beyond_the_disk_leaves_nothing(small_disk, tmp_path, moto_storage):
    source = tmp_path / "source"
    source.write_bytes(bytes(2 << 20))
    moto_storage.upload(source, "large")
    with pytest.raises(StorageError, match=f"cannot write {small_disk}/large: No space"):
        moto_storage.download("large", small_disk / "large")
    assert not list(small_disk.iterdir())


@pytest.fixture
def moto_storage(credentials, moto_port, monkeypatch):
    make_bucket(moto_port, "bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{moto_port}")
    return open_storage(f"s3://bucket/{uuid.uuid4().hex}")


WITHOUT_PERMISSION = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from steadytrain.components.shared.errors import StorageError\n"
    "from steadytrain.components.shared.storage import LocalStorage\n"
    "if os.geteuid() == 0:\n"
    "    os.setgroups([])\n"
    "    os.setgid(65534)\n"
    "    os.setuid(65534)\n"
    "storage = LocalStorage(Path(sys.argv[1]))\n"
    "for act, *arguments in (\n"
    "    (storage.write, 'kept', b'after'),\n"
    "    (storage.write, 'new', b'x'),\n"
    "    (storage.read, 'kept'),\n"
    "    (storage.delete, 'kept'),\n"
    "    (storage.list,),\n"
    "):\n"
    "    try:\n"
    "        print(act.__name__, act(*arguments))\n"
    "    except StorageError as error:\n"
    "        print(act.__name__, 'StorageError', error.message)\n"
)


def test_lost_permission_is_not_mistaken_for_absence():
    """If an unreadable ledger looked empty, everything would start over."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Path(folder, "locked")
        LocalStorage(place).write("kept", b"before")
        Path(folder).chmod(0o755)
        place.chmod(0o000)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_PERMISSION, str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        place.chmod(0o755)
        assert LocalStorage(place).read("kept") == b"before"
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert all("StorageError" in line and "Permission denied" in line for line in lines)


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/tmp/out", "", ".", "a//b", "a\\..\\b", "a\0"]
)
def test_name_never_leaves_its_folder(tmp_path, name):
    storage, outside = LocalStorage(tmp_path / "root"), tmp_path / "out"
    outside.write_bytes(b"theirs")
    for attempt in (
        lambda: storage.read(name),
        lambda: storage.write(name, b"ours"),
        lambda: storage.write(name, b"ours", if_absent=True),
        lambda: storage.write_stream(name, [b"ours"]),
        lambda: list(storage.read_stream(name)),
        lambda: storage.exists(name),
        lambda: storage.delete(name),
        lambda: storage.clear(name),
        lambda: storage.download(name, tmp_path / "copy"),
        lambda: storage.upload(outside, name),
        lambda: storage.sub(name),
    ):
        with pytest.raises(UnsafeName, match="not the name of a file"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert outside.read_bytes() == b"theirs"


def test_folder_in_the_place_of_a_file_is_an_error_that_no_retry_helps(tmp_path):
    storage, source = LocalStorage(tmp_path), tmp_path / "source"
    (tmp_path / "taken").mkdir()
    source.write_bytes(b"content")
    for attempt in (
        lambda: storage.write("taken", b"ours"),
        lambda: storage.write("taken", b"ours", if_absent=True),
        lambda: storage.write_stream("taken", [b"ours"]),
        lambda: storage.write("source/file", b"ours"),
        lambda: storage.upload(source, "taken"),
    ):
        with pytest.raises(PathTaken, match=r"cannot write .*: (Is a|Not a|File e)") as caught:
            attempt()
        assert "move away what is in its place" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "taken"]


def test_only_a_file_is_a_stored_file(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("missing")
    os.mkfifo(tmp_path / "pipe")
    assert is_stored(tmp_path / "file")
    assert not is_stored(tmp_path / "missing")
    assert not is_stored(tmp_path / "missing" / "file")
    for name in ("folder", "link", "pipe", "file/file"):
        with pytest.raises(PathTaken, match=f"cannot use {tmp_path / name}: ") as caught:
            is_stored(tmp_path / name)
        assert "move away what is in its place" in caught.value.remedy


def test_links_are_not_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeName, match="symbolic link"):
        below(tmp_path / "folder", "link/file", origin="test")
    # The folder's own address may be a link, because the user chose it.
    (tmp_path / "alias").symlink_to(tmp_path / "folder")
    assert below(tmp_path / "alias", "file", origin="test") == tmp_path / "alias" / "file"


def test_prefix_may_contain_any_characters(monkeypatch):
    with mocked_s3(monkeypatch):
        storage = open_storage("s3://bucket/a?b#c %20é")
        storage.sub("d?").write("e#f", b"content")
        assert open_storage("s3://bucket").list() == ["a?b#c %20é/d?/e#f"]
        assert storage.list() == ["d?/e#f"]


@pytest.mark.parametrize("name", ["package:yaml/../..", "package:yaml//etc", "package:json/.."])
def test_package_path_stays_in_its_package(name):
    with pytest.raises(UnsafeName, match="not the name of a file"):
        package_folder(name.removeprefix("package:"))
    with pytest.raises(UnsafeName, match="not the name of a file"):
        find_files(name, [])


def test_write_that_fails_keeps_what_was_there(tmp_path):
    link, target = tmp_path / "link.yaml", tmp_path / "steadytrain.yaml"
    link.symlink_to(target.name)
    target.write_text("before")
    write_texts(tmp_path, {link.name: "before"}, "--write")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(BadInput, match="cannot be written: File too large"):
            write_texts(tmp_path, {link.name: "after" * 1000}, "--write")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert target.read_text() == "before"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, tmp_path / LIST, target]
    write_texts(tmp_path, {link.name: "after"}, "--write")
    assert target.read_text() == "after"


def test_a_link_to_itself_is_not_replaced(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(BadInput, match="loop cannot be written: Too many levels"):
        local.write_requested(loop, b"x", "")
    assert loop.is_symlink()


def test_texts_replace_and_remove_only_what_was_written_before(tmp_path):
    def write(**texts):
        written, removed = write_texts(tmp_path, texts, "--write")
        assert [path.name for path in written] == [*texts]
        return [path.name for path in removed]

    def there():
        return {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != LIST}

    assert write(a="1", b="1", c="1") == []
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "b").unlink()
    assert write(a="2", d="2") == ["c"]
    assert there() == {"a": "2", "d": "2", "mine": "mine"}
    (tmp_path / "a").write_text("edited")
    before = there()
    for texts, name in (
        ({"a": "3"}, "a"),
        ({"d": "3"}, "a"),
        ({"a": "edited", "mine": ""}, "mine"),
    ):
        with pytest.raises(BadInput, match=rf"--write .*: {name}"):
            write(**texts)
        assert there() == before
    assert write(a="edited") == ["d"]


@pytest.mark.parametrize("count", range(5))
def test_texts_after_a_kill_replace_what_was_written_and_what_was_not(tmp_path, monkeypatch, count):
    write_texts(tmp_path, {"a": "1", "b": "1"}, "--write")
    whole, left = local.write_requested, [None] * count

    def killed(path, content, option):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        whole(path, content, option)

    monkeypatch.setattr(local, "write_requested", killed)
    with pytest.raises(KeyboardInterrupt):
        write_texts(tmp_path, {"a": "2", "b": "2", "c": "2"}, "--write")
    monkeypatch.undo()
    write_texts(tmp_path, {"a": "3"}, "--write")
    assert {path.name for path in tmp_path.iterdir()} == {"a", LIST}


@pytest.mark.parametrize("content", ["", "x", "../victim", "  ", "\0", "a  b  c\n", "\udcff"])
def test_damaged_list_of_files_removes_nothing(tmp_path, content):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    digest = file_digest(victim)
    folder = tmp_path / "folder"
    folder.mkdir()
    text = f"{digest}  ../victim\n{digest}  {victim}\n{content}"
    (folder / LIST).write_text(text, errors="surrogateescape")
    write_texts(folder, {"a": "1"}, "--write")
    assert victim.read_text() == "mine"
