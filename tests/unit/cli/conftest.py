"""Files and folders that a path option may point to."""

from __future__ import annotations

import os

import pytest
import urllib3

from support.odd import alone


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working folder with one file of each kind."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (folder / "file").write_text("x")
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "list.yaml").write_text("- a\n")
    (folder / "bad.yaml").write_text("a: [1\n")
    (folder / "good.yaml").write_text(
        "name: tiny\noutput: out\ndata: {source: [file]}\n"
        "model: {config: {model_type: llama}}\ntraining: {max_steps: 2}\n"
    )
    (folder / "prices.yaml").write_text("H100: {usd_per_hour: 8}\n")
    (folder / "schedules.yaml").write_text(
        "name: nightly\nschedules:\n- {name: a, config: good.yaml, overrides: {output: /mnt}, "
        "interval: 6h}\n"
    )
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    os.mkfifo(folder / "fifo")
    # A server that refuses connections gets the usual number of retries, but without the delays.
    monkeypatch.setattr(urllib3.Retry, "get_backoff_time", lambda _: 0.0)
    with alone():
        yield folder
