"""Curricula in full runs: killed and resumed, on two ranks, and in smaller micro-batches."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.events.types import WorkProgress

from support import selected
from support.task_data import STILL, data_of, write_reference
from support.training import events_of, losses_of, weights_digest
from support.whole_runs import RECIPE, KillsOnce, run


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return the data of a classifier."""
    return data_of("sequence_classification", tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def easy_first(texts, tmp_path_factory):
    """Return the sections of a run with a curriculum, and the run."""
    recipe = {**RECIPE, "global_batch_size": 8, "micro_batch_size": 4}
    recipe["curriculum"] = {"by": "length", "start": 0.2, "over": 0.7}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(tmp_path_factory.mktemp("easy"), texts, sections)


@pytest.mark.long
@pytest.mark.parametrize("shards", ["ddp", "fsdp", "zero3"])
def test_two_ranks_follow_the_same_curriculum(tmp_path, texts, easy_first, shards):
    sections, whole = easy_first
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_follow_the_same_curriculum(tmp_path, texts, easy_first):
    sections, whole = easy_first
    halved = {**sections, "training": {**sections["training"], "micro_batch_size": 2}}
    found = run(tmp_path / "halved", texts, halved)
    assert losses_of(found) == pytest.approx(losses_of(whole), rel=1e-5)
    plain = {"training": {**sections["training"], "curriculum": {}}, "model": sections["model"]}
    assert losses_of(run(tmp_path / "plain", texts, plain)) != losses_of(whole)


class KillsWhileScoring(KillsOnce):
    """Kills rank 0 when it begins to score the rows."""

    kind = "WorkProgress"

    def emit(self, event):
        if isinstance(event, WorkProgress) and not self.done:
            self.kill()


@pytest.fixture(scope="module")
def learned_first(texts, tmp_path_factory):
    """Return the sections of a run with a curriculum by a model's loss, and the run."""
    root = tmp_path_factory.mktemp("learned")
    teacher = write_reference("sequence_classification", root / "teacher", **STILL)
    recipe = {**RECIPE, "global_batch_size": 8, "micro_batch_size": 4}
    recipe["curriculum"] = {"by": "loss", "model": teacher, "start": 0.2, "over": 0.7}
    sections = {"training": recipe, "model": {"config": STILL}}
    return sections, run(root / "run", texts, sections)


@pytest.mark.parametrize("sink", [KillsWhileScoring, KillsOnce])
def test_killed_run_scores_the_rows_once(tmp_path, texts, learned_first, sink):
    sections, whole = learned_first
    killed = run(tmp_path, texts, sections, killed=sink)
    assert weights_digest(killed) == weights_digest(whole)
    done = [event.done for event in events_of(killed, WorkProgress)]
    assert done == ([0, 60] if sink is KillsOnce else [0, 0, 60])


@selected.each("shards", ["ddp", "fsdp", "zero3"], few=["ddp"])
def test_two_ranks_score_the_rows_like_one(tmp_path, texts, learned_first, shards):
    sections, whole = learned_first
    shared = run(tmp_path, texts, sections, ranks=2, strategy=shards)
    (ours,), (theirs,) = (list(each.losses.iterdir()) for each in (shared, whole))
    assert (ours.name, ours.read_bytes()) == (theirs.name, theirs.read_bytes())
    assert losses_of(shared) == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.long
def test_smaller_micro_batches_follow_the_losses(tmp_path, texts, learned_first):
    sections, whole = learned_first
    halved = {**sections, "training": {**sections["training"], "micro_batch_size": 2}}
    assert losses_of(run(tmp_path, texts, halved)) == pytest.approx(losses_of(whole), rel=1e-5)
