"""The SQLite store in an output folder: how it is created, and one that is incomplete."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import StorageError, TrackingError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking import check_tracking, use_tracking
from steadytrain.components.shared.tracking import connect as connect_module
from steadytrain.components.shared.tracking import store as store_module
from steadytrain.components.shared.workspace import Workspace

from support.stores import cut_short

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def new(config: RunConfig) -> Workspace:
    """A workspace without a store."""
    workspace = Workspace.of(config)
    workspace.create()
    return workspace


def warnings(workspace: Workspace) -> list[str]:
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


@pytest.mark.slow
def test_store_is_created_atomically_before_any_timeout_starts(
    config: RunConfig, new: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs start at once. Any process that sees the file can use it."""
    path, sizes, limited, contents = new.tracking_store, set(), [], []
    real, write = connect_module.error_with_timeout, store_module.LocalStorage.write

    def timed(seconds: float, work: Callable[[], object]) -> Exception | None:
        limited.append(path.is_file())
        return real(seconds, work)

    def counted(storage: object, name: str, content: bytes, **how: bool) -> bool:
        contents.extend([content] if name == path.name else [])
        return write(storage, name, content, **how)

    monkeypatch.setattr(connect_module, "error_with_timeout", timed)
    monkeypatch.setattr(store_module.LocalStorage, "write", counted)
    runs = [threading.Thread(target=check_tracking, args=(config, new)) for _ in range(2)]
    for run in runs:
        run.start()
    while any(run.is_alive() for run in runs):
        with contextlib.suppress(FileNotFoundError):
            sizes.add(path.stat().st_size)
        time.sleep(0.001)
    sizes.add(path.stat().st_size)
    assert limited == [True, True]
    (content,) = contents
    assert min(sizes) == len(content)
    use_tracking(config, new)
    assert {item.name for item in new.output.iterdir()} == {"locks", "runs", "mlflow.db"}


@pytest.mark.slow
def test_incomplete_store_is_created_again(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "QUIET_SECONDS", 0.1)
    cut_short(workspace.tracking_store)
    before = workspace.tracking_store.read_bytes()
    check_tracking(config, workspace)
    aside = workspace.output / "mlflow.db.damaged-1"
    assert aside.read_bytes() == before
    (message,) = warnings(workspace)
    assert f"it was moved to {aside}" in message


@pytest.mark.parametrize("rest", ["", "tables"])
def test_store_being_created_by_another_process_is_waited_for(
    config: RunConfig, new: Workspace, empty_store: Path, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "QUIET_SECONDS", 300.0)
    path = new.tracking_store
    path.write_bytes(empty_store.read_bytes() if rest else b"")
    if rest:
        cut_short(path)

    def finish() -> None:
        time.sleep(1)
        with (
            contextlib.closing(sqlite3.connect(empty_store)) as whole,
            contextlib.closing(sqlite3.connect(path)) as place,
        ):
            whole.backup(place)

    other = threading.Thread(target=finish)
    other.start()
    check_tracking(config, new)
    other.join()
    assert not warnings(new)
    assert not list(new.output.glob("*.damaged-*"))


def test_store_with_runs_is_never_set_aside(config: RunConfig, workspace: Workspace) -> None:
    """The same holds for a store of another MLflow version, which cannot be used here."""
    with contextlib.closing(sqlite3.connect(workspace.tracking_store)) as store, store:
        store.execute("UPDATE alembic_version SET version_num = 'bf29a5ff90ea'")
    with pytest.raises(TrackingError, match="out-of-date") as refused:
        check_tracking(config, workspace)
    # Without the store, the runs in it would be lost.
    assert "move it away" not in refused.value.remedy
    assert not list(workspace.output.glob("*.damaged-*"))


def test_file_that_is_not_a_store_is_kept_and_named(config: RunConfig, new: Workspace) -> None:
    new.tracking_store.write_text("notes\n" * 1000)
    with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used: .*not a database"):
        check_tracking(config, new)
    assert new.tracking_store.read_text() == "notes\n" * 1000


def test_another_programs_tables_are_left(new: Workspace) -> None:
    with contextlib.closing(sqlite3.connect(new.tracking_store)) as store, store:
        store.execute("CREATE TABLE contacts (name TEXT)")
    before = new.tracking_store.read_bytes()
    store_module.ensure_store(f"sqlite:///{new.tracking_store}", new)
    assert new.tracking_store.read_bytes() == before
    assert not list(new.output.glob("*.damaged-*"))


def test_configured_store_file_is_created_in_place(
    make_config: MakeConfig, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_new_store", lambda _: empty_store.read_bytes())
    config = make_config(tracking={"uri": f"sqlite:///{tmp_path}/elsewhere/own.db"})
    workspace = Workspace.of(config)
    workspace.create()
    check_tracking(config, workspace)
    assert [item.name for item in (tmp_path / "elsewhere").iterdir()] == ["own.db"]
    assert not workspace.tracking_store.exists()


def test_full_disk_is_reported_for_a_new_store(
    config: RunConfig, new: Workspace, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_new_store", lambda _: empty_store.read_bytes())
    monkeypatch.setattr("steadytrain.components.shared.storage.local.os.fsync", full)
    with pytest.raises(StorageError, match=r"mlflow\.db: No space left"):
        check_tracking(config, new)
    assert not new.tracking_store.exists()
