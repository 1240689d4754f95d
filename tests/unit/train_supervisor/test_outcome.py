"""How an attempt ended: rank 0's result, the exits of the ranks, and the request."""

from __future__ import annotations

import pytest

from steadytrain.components.train.attempt import AttemptResult
from steadytrain.components.train.recovery.outcome import conclude


def told(folder, outcome):
    AttemptResult(
        outcome=outcome,
        step=5,
        max_steps=9,
        best_step=5,
        best_score=1.0,
        metric="loss",
        parameters=1,
    ).save(folder.result)


@pytest.mark.parametrize(
    ("result", "exits", "requested", "outcome", "failure_class"),
    [
        ("finished", {0: 0}, None, "finished", None),
        ("early_stopped", {0: 0}, None, "early_stopped", None),
        # It finished before the request came.
        ("finished", {0: 0}, "preempted", "finished", None),
        # Someone wrote the stop file.
        ("stopped", {0: 0}, None, "stopped", None),
        ("pruned", {0: 0, 1: 0}, None, "pruned", None),
        ("preempted", {0: 143, 1: 143}, None, "preempted", "preemption"),
        ("preempted", {0: 143}, "stopped", "stopped", None),
        # Killed at the end of the grace period, or before it could handle the signal.
        (None, {0: -9}, "preempted", "preempted", None),
        (None, {0: -15}, "stopped", "stopped", None),
        # A result alone is not a success.
        ("finished", {0: 0, 1: -9}, None, "failed", "host_oom"),
        ("pruned", {0: 3}, None, "failed", "unknown"),
        (None, {0: 0}, None, "failed", "unknown"),
    ],
)
def test_outcome_follows_exits_and_requests(
    folder, result, exits, requested, outcome, failure_class
):
    if result:
        told(folder, result)
    ending = conclude(folder, exits, requested)
    assert ending.outcome == outcome
    assert (ending.failure.failure_class if ending.failure else None) == failure_class


def test_only_the_tail_of_a_long_log_is_read(folder):
    folder.log(0).write_bytes(b"CUDA out of memory\n" + b"x" * 200_000 + b"\nthe end")
    failure = conclude(folder, {0: 1}, None).failure
    assert failure.failure_class == "unknown"
    assert "the end" in failure.message
