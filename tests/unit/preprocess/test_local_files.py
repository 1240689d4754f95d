"""What a data folder must not make the product read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from steadytrain.components.preprocess.inputs import dataset_digest, find_inputs
from steadytrain.components.preprocess.local_files import BROKEN, LINKS, SPECIAL, open_regular
from steadytrain.components.preprocess.sources import SourceFile, find_files
from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.components.shared.records import DataRecord

from support.data import texts, write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with a file outside of it, in its parent folder."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("inside\n")
    (tmp_path.parent / "outside.txt").write_text("outside\n")
    (tmp_path / "outside.txt").write_text("outside\n")
    return tmp_path / "data"


def found(address: Path | str) -> tuple[list[str], dict[str, int]]:
    left_out: Counter[str] = Counter()
    files = find_files(str(address), [], left_out)
    return [file.path for file in files], dict(left_out)


def content(file: SourceFile) -> bytes:
    with file.open(Path("/nowhere")) as stream:
        return stream.data.read()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)
    os.chdir(before)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (link_to("/proc/self/environ"), LINKS),
        (link_to("/etc/passwd"), LINKS),
        (link_to("../../outside.txt"), LINKS),
        (link_to("/dev/null"), LINKS),
        (link_to("absent.txt"), BROKEN),
        (pipe, SPECIAL),
        (unix_socket, SPECIAL),
    ],
)
@pytest.mark.parametrize("place", ["x.txt", "sub/x.txt"])
def test_files_that_are_not_data_are_skipped(
    folder: Path, make: Any, what: str, place: str
) -> None:
    make(folder / place)
    assert found(folder) == (["a.txt"], {what: 1})
    assert found(folder / "**" / "*.txt") == (["a.txt"], {what: 1})


def test_link_to_a_folder_outside_is_left_out(folder: Path) -> None:
    (folder / "etc").symlink_to("/etc")
    assert found(folder) == (["a.txt"], {LINKS: 1})
    (folder / "sub" / "b.txt").write_text("b\n")
    names, left_out = found(folder / "*" / "*")
    assert names == ["sub/b.txt"]
    assert left_out[LINKS] > 1


def test_only_links_give_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=f"1 {LINKS} are left out"):
        found(tmp_path / "data")


def test_links_that_stay_inside_are_read_and_so_is_a_linked_source(folder: Path) -> None:
    """A ConfigMap volume looks like this."""
    real = folder / "..2026"
    real.mkdir()
    (real / "b.txt").write_text("b\n")
    (folder / "..data").symlink_to("..2026")
    (folder / "b.txt").symlink_to("..data/b.txt")
    linked = folder.with_name("linked")
    linked.symlink_to(folder)
    assert found(linked) == (["..2026/b.txt", "a.txt", "b.txt"], {})
    files = find_files(str(linked), [])
    assert [content(file) for file in files] == [b"b\n", b"inside\n", b"b\n"]
    assert files[1].name == str(linked / "a.txt")
    assert found(linked / "b.txt") == (["b.txt"], {})


def test_circular_links_are_skipped(folder: Path) -> None:
    (folder / "x.txt").symlink_to("y.txt")
    (folder / "y.txt").symlink_to("x.txt")
    (folder / "sub" / "up").symlink_to("..")
    assert found(folder) == (["a.txt"], {BROKEN: 2})


@pytest.mark.parametrize(
    "address",
    [
        "/proc/self/environ",
        "/proc/self",
        "/proc/*/environ",
        "/sys/kernel",
        "/dev/null",
        "/dev",
        "/dev/stdin",
        "{folder}/pipe",
        "{folder}/to-environ",
        "{folder}/to-proc",
        "{folder}/to-null",
    ],
)
def test_kernel_files_are_rejected(folder: Path, address: str) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "to-environ").symlink_to("/proc/self/environ")
    (folder / "to-proc").symlink_to("/proc/self")
    (folder / "to-null").symlink_to("/dev/null")
    with pytest.raises(BadInput, match="steadytrain reads no pipes"):
        found(address.format(folder=folder))


def test_dots_cannot_leave_a_package(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not the name of a file below a folder"):
        find_files("package:json/../../../../../etc/passwd", [])


@pytest.mark.parametrize("swap", ["link", "pipe", "folder above"])
def test_replaced_file_is_not_read(folder: Path, swap: str) -> None:
    path = folder / "sub" / "b.txt"
    path.write_text("b\n")
    (file,) = find_files(str(path), [])
    if swap == "folder above":
        (folder / "sub").rename(folder / "was")
        (folder / "sub").symlink_to(folder / "was")
    else:
        path.unlink()
        pipe(path) if swap == "pipe" else path.symlink_to("/etc/passwd")
    with pytest.raises(DataError, match=r"replaced|cannot be read"):
        content(file)
    with pytest.raises(DataError, match=r"replaced|cannot be read"):
        file.digest()


def test_descriptor_is_not_leaked(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for _ in range(3):
        with pytest.raises(DataError, match="replaced"):
            open_regular(folder / "pipe")
    opened = set()
    for item in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.add(item.readlink())
    assert (folder / "pipe").resolve() not in opened


def test_data_card_shows_the_count_and_the_key_contains_it(
    tmp_path: Path, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "sekret-canary-value")
    write_jsonl(tmp_path / "in" / "x.jsonl", texts(60))
    config = configure(tmp_path / "in")
    assert _card(run(config))["left_out"] == {}
    (tmp_path / "in" / "y.jsonl").symlink_to("/proc/self/environ")
    record = run(config)
    assert _card(record)["left_out"] == {LINKS: 1}
    assert in_one_line(record, _card(record)).endswith(f"; files left out: 1 {LINKS}")
    assert f"1 {LINKS}" in record.path("card.html").read_text()
    for file in Path(record.folder).rglob("*"):
        assert not file.is_file() or b"sekret-canary" not in file.read_bytes()
    data = DataConfig(source=[str(tmp_path / "in")], exclude=["y.jsonl"])
    assert len(find_inputs(data).files) == 1


def test_data_set_of_the_library_with_a_link_that_leaves_it_is_rejected(tmp_path: Path) -> None:
    """The datasets library would follow the link."""
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(texts(3)).save_to_disk(saved)
    (saved / "x.arrow").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=f"1 {LINKS}"):
        dataset_digest(str(saved))
    with pytest.raises(BadInput, match=f"1 {LINKS}"):
        dataset_digest(f"hub:{saved}")


def _card(record: DataRecord) -> dict[str, Any]:
    return dict(json.loads(record.path("card.json").read_text(encoding="utf-8")))
