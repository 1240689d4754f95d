"""Files that another machine writes, seen through a file system that caches missing names."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.stopping import StopRequest
from steadytrain.components.shared.storage import local
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.train.agent.__main__ import Agent
from steadytrain.components.train.agent.ranks import NodeShare
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec, Exits
from steadytrain.components.train.launch import agent as launched
from steadytrain.components.train.launch.agent import AgentAttempt, AgentExit
from steadytrain.components.train.loop.control import StopRequests

from support.fuse import mirror

__all__ = ["mirror"]


def test_missing_name_is_remembered_until_the_folder_is_opened(mirror):
    """This is what the tests below rely on."""
    behind, seen = mirror
    assert not (seen / "a").exists()
    (behind / "a").touch()
    assert not (seen / "a").exists()
    assert list(seen.iterdir()) == [seen / "a"]
    assert (seen / "a").exists()


@pytest.fixture
def attempt(mirror, tmp_path):
    """Return an attempt's folder as its writer sees it, and as this machine does."""
    behind, seen = mirror
    config = from_mapping(
        {
            "name": "tiny",
            "run": "tiny",
            "output": str(tmp_path / "output"),
            "data": {"source": ["unused"]},
            "model": {"config": {"model_type": "llama"}},
        }
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    spec = AttemptSpec(
        attempt=1,
        run_id="tiny",
        config=str(tmp_path / "config.yaml"),
        data="",
        batch=BatchSettings(8),
        gradient_accumulation_steps=1,
        generation=1,
    )
    theirs = AttemptFolder(behind / "0001")
    spec.save(theirs.spec)
    return theirs, AttemptFolder(seen / "0001")


@pytest.fixture
def impatient(monkeypatch):
    """Ask the server at every look."""
    monkeypatch.setattr(local, "_ASK_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_every_file_that_is_polled_is_seen_at_once(attempt):
    theirs, ours = attempt
    agent, requests = Agent(ours, NodeShare(0, 1, 1)), StopRequests(ours.stop)
    running = AgentAttempt(ours, gone=lambda _: None)
    assert agent._grace(StopRequest()) is None
    assert requests.flags() == [0, 0, 0]
    assert not running.poll()
    theirs.leave.write_text("7")
    theirs.stop.write_text("pruned")
    # The agent makes the folder of its node, so that is news too.
    Exits(time=1.0, statuses={0: 0}).save(theirs.node(0).exits)
    assert agent._grace(StopRequest()) == 7
    assert requests.flags() == [0, 0, 1]
    assert running.poll()
    assert running.exits() == {0: 0}


def test_server_is_not_asked_at_each_look(mirror, monkeypatch):
    behind, seen = mirror
    clock = 1000.0
    monkeypatch.setattr(local.time, "monotonic", lambda: clock)
    file = Awaited(seen / "a")
    assert not file.there()
    (behind / "a").touch()
    assert not file.there()
    assert file.there(surely=True)
    (behind / "b").touch()
    other = Awaited(seen / "c")
    assert not other.there()
    (behind / "c").touch()
    clock += 1.0
    assert other.there()


def test_report_of_a_successful_pod_is_waited_for(attempt, monkeypatch):
    theirs, _ = attempt
    done = AgentAttempt(theirs, gone=lambda _: AgentExit(0))
    assert not done.poll()
    Exits(time=1.0, statuses={0: 0}).save(theirs.node(0).exits)
    assert done.poll()
    assert (done.exits(), theirs.errors()) == ({0: 0}, [])


def test_successful_pod_without_a_report_is_lost_in_the_end(attempt, monkeypatch):
    theirs, _ = attempt
    monkeypatch.setattr(launched, "CACHED_SECONDS", 0.0)
    done = AgentAttempt(theirs, gone=lambda _: AgentExit(0))
    assert done.poll()
    (error,) = theirs.errors()
    assert error.kind == "AgentLost"
    assert "exit status 0" in error.message
