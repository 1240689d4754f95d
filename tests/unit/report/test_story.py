"""A run's status, derived from its events alone."""

from __future__ import annotations

from typing import Any

import pytest

from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import attempts, executions, latest, outcome
from steadytrain.components.report.timing import phases, repeated_steps, wall_seconds


def told(run: Any) -> tuple[str, str]:
    standing = outcome(gather(run.workspace))
    return standing.state, standing.sentence


def states(run: Any) -> dict[str, str]:
    found = latest(executions(gather(run.workspace).events))
    return {item.stage: item.state for item in found}


def test_running_or_killed_step(bare: Any) -> None:
    bare.start_step("preprocess")
    state, sentence = told(bare)
    assert state == "unfinished"
    assert "preprocess is still running, or was killed" in sentence


def test_stopped_on_request(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.attempt(1, last=50, max_steps=100, outcome="stopped")
    bare.fail("train", "KeyboardInterrupt", "")
    assert told(bare) == ("stopped", "stdlib-lm was stopped in train, at training step 50.")


def test_between_two_steps(bare: Any) -> None:
    bare.preprocess()
    assert told(bare) == ("unfinished", "stdlib-lm has not continued after preprocess.")


def test_failure_that_was_fixed_is_not_reported(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.fail("train", "TrainingFailed", "out of memory")
    assert told(bare)[0] == "failed"
    bare.clock += 3600
    bare.again()
    bare.start_step("preprocess")
    bare.finish("preprocess", 0.1, reused=True)
    assert states(bare) == {"begin": "finished", "preprocess": "reused"}
    bare.start_step("train")
    bare.finish("train", 10)
    assert states(bare) == {"begin": "finished", "preprocess": "reused", "train": "finished"}
    assert told(bare)[0] == "unfinished"


def test_killed_step_ends_at_its_last_heartbeat(bare: Any) -> None:
    bare.start_step("preprocess")
    bare.clock += 5
    bare.warn("something", stage="preprocess")
    bare.clock += 1000
    bare.start_step("preprocess")
    bare.finish("preprocess", 7)
    found = executions(gather(bare.workspace).events)
    assert [item.state for item in found] == ["unfinished", "finished"]
    assert found[0].seconds == pytest.approx(5)
    assert found[1].seconds == pytest.approx(7)


def test_killed_step_before_another_step(bare: Any) -> None:
    bare.preprocess()
    bare.start_step("train")
    bare.clock += 5
    bare.warn("still here")
    bare.clock += 1000
    bare.start_step("evaluate")
    bare.finish("evaluate", 7)
    found = {item.stage: item for item in executions(gather(bare.workspace).events)}
    assert found["train"].state == "unfinished"
    assert found["train"].seconds == pytest.approx(5)


def test_promoted_run_is_complete_only_when_the_alias_is_set(language_model: Any) -> None:
    assert told(language_model)[0] == "finished"
    events = gather(language_model.workspace)
    events.events = [item for item in events.events if getattr(item, "stage", "") != "promote"]
    assert outcome(events).state == "unfinished"


def test_report_does_not_list_itself(language_model: Any) -> None:
    before = told(language_model)
    language_model.clock += 5
    language_model.start_step("report")
    assert told(language_model) == before


def test_phases_add_up_to_wall_time(language_model: Any) -> None:
    ran = executions(gather(language_model.workspace).events)
    # Gaps between steps are left out if they are shorter than half a second.
    whole = sum(phase.seconds for phase in phases(ran))
    assert whole == pytest.approx(wall_seconds(ran), abs=0.5)


def test_repeated_steps(language_model: Any) -> None:
    tried = attempts(gather(language_model.workspace))
    assert [(item.first_step, item.last_step) for item in tried] == [
        (0, 170),
        (100, 260),
        (200, 400),
    ]
    assert repeated_steps(tried) == 70 + 60


def test_attempt_whose_end_was_not_recorded(bare: Any) -> None:
    bare.start_step("train")
    bare.attempt(1, last=40, max_steps=100)
    facts = gather(bare.workspace)
    facts.events = [item for item in facts.events if item.name != "attempt_ended"]
    (known,) = attempts(facts)
    assert known.outcome == "finished", "the ledger knows"
    facts.history.attempts[0].ended = None
    (attempt,) = attempts(facts)
    assert attempt.outcome == "cut off"
    assert attempt.last_step == 40
    assert attempt.end == facts.events[-1].time


def test_no_steps_take_no_time() -> None:
    assert wall_seconds([]) == 0
    assert phases([]) == []
