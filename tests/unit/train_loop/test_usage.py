"""Each rank reports what it uses, now and then, and never fails for that."""

from __future__ import annotations

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import RankUsage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.loop.usage import EVERY_SECONDS, Usage


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_every_rank_reports_in_its_own_file_but_not_after_every_step(tmp_path):
    workspace, clock = Workspace(tmp_path, "run"), Clock()
    usages = [Usage(workspace, 2, rank, clock) for rank in (0, 3)]
    for _ in range(25):
        clock.now += EVERY_SECONDS / 10
        for usage in usages:
            usage.report()
    found = [event for event in read_events(workspace.events) if isinstance(event, RankUsage)]
    assert sorted((item.attempt, item.rank, item.sample) for item in found) == [
        (2, 0, 1),
        (2, 0, 2),
        (2, 3, 1),
        (2, 3, 2),
    ]
    assert min(item.memory_used for item in found) > 1e6
    assert len(list(workspace.events.iterdir())) == 2


def test_rank_that_is_done_sooner_writes_no_file(tmp_path):
    workspace, clock = Workspace(tmp_path, "run"), Clock()
    usage = Usage(workspace, 1, 0, clock)
    clock.now = EVERY_SECONDS - 1
    usage.report()
    assert not workspace.events.exists()


def test_folder_that_cannot_be_written_fails_no_rank(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    clock = Clock()
    usage = Usage(Workspace(tmp_path, "run"), 1, 0, clock)
    clock.now = EVERY_SECONDS
    usage.report()
