"""Base models on S3: no key writes outside the cache, and the cache holds only full models."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.model_source import base_content, resolve_model
from steadytrain.components.shared.storage import S3Storage
from steadytrain.components.shared.workspace import Workspace

from support.command import wait_for
from support.proxy import proxy_to
from support.s3 import client_of, make_bucket


@pytest.fixture
def address(moto_port, credentials, monkeypatch):
    """Return an address on moto, which accepts any key that S3 does. SeaweedFS refuses `..`."""
    make_bucket(moto_port, "bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{moto_port}")
    return f"s3://bucket/{uuid.uuid4().hex}"


@pytest.fixture
def put(address, moto_port):
    client = client_of(moto_port)
    prefix = address.removeprefix("s3://bucket/")
    return lambda key, content=b"x": client.put_object(
        Bucket="bucket", Key=f"{prefix}/{key}", Body=content
    )


@pytest.fixture
def config(tmp_path, address):
    return from_mapping(
        {
            "name": "small",
            "output": str(tmp_path / "deep" / "output"),
            "data": {"source": ["data.jsonl"]},
            "model": {"base": address},
        }
    )


def files(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        "../../evil.pth",
        "sub/../../../evil.pth",
        "..",
        "sub/..",
        "{tmp}/evil.pth",
        "sub//evil.pth",
        "./evil.pth",
        "..\\evil.pth",
        "C:\\evil.pth",
        "nul\0byte",
    ],
)
def test_key_outside_the_folder_is_rejected_and_writes_nothing(key, tmp_path, address, put, config):
    put("config.json", b"{}")
    put(key.format(tmp=tmp_path))

    with pytest.raises(BadInput) as caught:
        resolve_model(address, config)

    assert repr(key.format(tmp=tmp_path)) in caught.value.message
    assert address in caught.value.message
    assert "rename" in caught.value.remedy
    assert not any("evil" in name or "byte" in name for name in files(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "a/b"), ("sub/a", "sub/a/b/c"), ("Config.json", "config.json"), ("é", "e\u0301")],
)
def test_keys_that_collide_as_files_are_rejected(one, other, tmp_path, address, put, config):
    put(one)
    put(other)

    with pytest.raises(BadInput, match="collide") as caught:
        resolve_model(address, config)

    assert repr(one) in caught.value.message
    assert repr(other) in caught.value.message
    assert files(tmp_path) == []


def test_ordinary_keys_become_the_files_of_one_folder(address, put, config):
    for key in ("config.json", "tokenizer/..hidden", "a b/é#?%.safetensors"):
        put(key, key.encode())

    folder = resolve_model(address, config)

    assert files(folder) == ["a b/é#?%.safetensors", "config.json", "tokenizer/..hidden"]
    assert (folder / "a b/é#?%.safetensors").read_bytes() == "a b/é#?%.safetensors".encode()


def test_model_that_has_changed_is_fetched_again(address, put, config):
    put("config.json", b"old")
    old = resolve_model(address, config)
    assert resolve_model(address, config) == old
    put("config.json", b"new")
    new = resolve_model(address, config)
    assert (old / "config.json").read_bytes() == b"old"
    assert (new / "config.json").read_bytes() == b"new"
    put("more.json", b"{}")
    assert files(resolve_model(address, config)) == ["config.json", "more.json"]


def test_interrupted_fetch_leaves_no_model(address, put, config, monkeypatch, tmp_path):
    for name in ("a", "b", "c"):
        put(name, name.encode())
    download = S3Storage.download

    def broken(storage, name, path):
        if name == "b":
            raise StorageError("the network is gone")
        download(storage, name, path)

    monkeypatch.setattr(S3Storage, "download", broken)
    with pytest.raises(StorageError, match="the network is gone"):
        resolve_model(address, config)
    assert not [name for name in files(tmp_path) if not name.endswith(".lock")]
    monkeypatch.setattr(S3Storage, "download", download)
    assert files(resolve_model(address, config)) == ["a", "b", "c"]


FETCH = """
import sys
from pathlib import Path
from steadytrain.components.shared.model_source import base_content
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.model_source import resolve_model
address, output = sys.argv[1:]
content = {"name": "small", "output": output, "data": {"source": ["a"]}, "model": {"base": address}}
print("ready", flush=True)
sys.stdin.readline()
print(resolve_model(address, from_mapping(content)), flush=True)
"""


def fetcher(address, config):
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, address, config.output],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_concurrent_fetches_share_one_complete_folder(address, put, config, tmp_path):
    for index in range(20):
        put(f"part-{index}", bytes(100_000))
    processes = [fetcher(address, config) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    (folder,) = {process.communicate()[0].strip() for process in processes}
    assert len(files(Path(folder))) == 20
    assert [process.returncode for process in processes] == [0, 0, 0]
    places = [path.name for path in Path(folder).parent.iterdir() if path.is_dir()]
    assert places == [Path(folder).name]


@pytest.mark.slow
def test_killed_download_starts_again(address, put, config, moto_port, monkeypatch):
    for index in range(200):
        put(f"part-{index:03}", bytes(200_000))
    downloads = Workspace.of(config).downloads
    with proxy_to(moto_port) as proxy, monkeypatch.context() as through:
        through.setenv("AWS_ENDPOINT_URL_S3", proxy.uri)
        proxy.concerns = lambda _, path: "part-" in path
        # However fast it is, it never has all of them.
        proxy.queued.extend([*["forward"] * 100, *["hang"] * 300])
        process = fetcher(address, config)
        process.stdin.write("\n")
        process.stdin.flush()
        wait_for(lambda: downloads.is_dir() and any(downloads.rglob("part-*")))
        process.kill()
        process.communicate()
    assert [path for path in downloads.iterdir() if path.is_dir()]
    assert not [path for path in downloads.iterdir() if not path.name.startswith(".")]

    folder = resolve_model(address, config)

    assert len(files(folder)) == 200
    assert [path for path in downloads.iterdir() if path.is_dir()] == [folder]


@pytest.mark.slow
def test_listing_shows_whether_a_base_model_has_changed(config, put):
    put("config.json", b"{}")
    put("model.safetensors", b"weights")
    before = base_content(config)
    assert base_content(config) == before
    put("model.safetensors", b"WEIGHTS")
    assert base_content(config) != before
    assert not Workspace.of(config).downloads.exists()
