"""The policy: what follows a failure, based on the ledger's history alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.policy import decide

from support.decided import BUDGETED, EXACT, Run, replace_settings

AT_ONCE = [FailureClass.DATA, FailureClass.USER_BUG]


@pytest.mark.parametrize("kind", AT_ONCE)
def test_failure_that_would_repeat_stops_at_once(kind):
    assert Run().fail(kind).action == "stop"


def test_failure_of_unknown_class_is_retried_once_without_a_new_checkpoint():
    run = Run()
    assert run.fail(FailureClass.UNKNOWN).action == "retry"
    assert run.fail(FailureClass.UNKNOWN, saves=True).action == "retry"
    last = run.fail(FailureClass.UNKNOWN)
    assert (last.action, last.reason) == (
        "stop",
        "unknown 2 times in a row without a new checkpoint",
    )


@pytest.mark.parametrize(
    "kind", sorted(set(BUDGETED) - {FailureClass.PREEMPTION, FailureClass.UNKNOWN})
)
def test_three_failures_open_the_breaker_and_its_last_try_stops_the_run(kind):
    run = Run()
    if kind is FailureClass.CHECKPOINT_CORRUPT:
        assert run.fail(kind).delay_seconds == 0
    delays = [run.fail(kind, unexplained=True).delay_seconds for _ in range(3)]
    assert delays == [2, 4, 120]
    last = run.fail(kind, unexplained=True)
    assert last.action == "stop"
    assert "breaker" in last.reason


def test_first_damaged_checkpoint_costs_nothing():
    run = Run(replace_settings(max_failures_per_class=1, breaker_failures=1))
    decision = run.fail(FailureClass.CHECKPOINT_CORRUPT)
    assert (decision.action, decision.delay_seconds) == ("retry", 0)
    assert "back to the newest intact checkpoint" in decision.reason
    assert "breaker" in run.fail(FailureClass.NETWORK).reason


def test_missing_nodes_are_dropped_down_to_the_allowed_minimum():
    run = Run(EXACT.model_copy(update={"min_nodes": 2}), batch=24, ranks=8, nodes=4)
    assert [run.fail(FailureClass.PENDING_TIMEOUT).nodes for _ in range(3)] == [3, 2, None]
    assert run.plan.global_batch_size == 24
    assert run.plan.world_size == 4
    assert run.history.nodes == 2
    reasons = [item.reason for item in run.history.decisions]
    assert "on 3 nodes instead of 4" in reasons[0]
    assert reasons[2].startswith("pending_timeout, 1 of at most 3 in a row")


def test_node_count_that_does_not_divide_the_batch_is_skipped():
    run = Run(EXACT.model_copy(update={"min_nodes": 1}), batch=32, ranks=4, nodes=4)
    assert [run.fail(FailureClass.PENDING_TIMEOUT).nodes for _ in range(3)] == [2, 1, None]


@pytest.fixture
def shrunk():
    """A run on 2 of its 4 nodes, with its retry budget unused."""
    run = Run(EXACT.model_copy(update={"min_nodes": 1}), batch=24, ranks=8, nodes=4)
    assert [run.fail(FailureClass.PENDING_TIMEOUT).nodes for _ in range(2)] == [3, 2]
    return run


def test_run_that_made_progress_on_fewer_nodes_tries_all_again(shrunk):
    decision = shrunk.fail(FailureClass.PREEMPTION, saves=True)
    assert (decision.action, decision.nodes) == ("retry_changed", 4)
    assert "tries 4 nodes again instead of 2" in decision.reason
    assert shrunk.history.grows(shrunk.history.next_attempt)
    assert shrunk.plan.world_size == 8
    assert shrunk.plan.global_batch_size == 24
    assert shrunk.fail(FailureClass.NETWORK, saves=True).nodes is None
    assert shrunk.history.nodes == 4


def test_nodes_that_are_still_missing_cost_no_retry(shrunk):
    for _ in range(5):
        assert shrunk.fail(FailureClass.NETWORK, saves=True).nodes == 4
        back = shrunk.fail(FailureClass.PENDING_TIMEOUT)
        assert (back.nodes, back.delay_seconds) == (2, 0)
        assert "back on 2 nodes" in back.reason
        assert not shrunk.history.grows(shrunk.history.next_attempt)


def test_run_without_progress_on_fewer_nodes_keeps_them(shrunk):
    decisions = [shrunk.fail(FailureClass.NETWORK) for _ in range(3)]
    assert [item.nodes for item in decisions] == [None, None, None]
    assert [item.delay_seconds for item in decisions] == [2, 4, 120]


def test_failures_on_the_way_to_all_nodes_use_the_retry_budget(shrunk):
    assert shrunk.fail(FailureClass.NETWORK, saves=True).nodes == 4
    assert shrunk.fail(FailureClass.PENDING_TIMEOUT).nodes == 2
    assert shrunk.fail(FailureClass.NETWORK).delay_seconds == 4


def test_all_nodes_are_waited_for_unless_fewer_are_allowed():
    assert Run(batch=32, ranks=4, nodes=4).fail(FailureClass.PENDING_TIMEOUT).nodes is None


def test_breaker_counts_across_classes():
    run = Run()
    assert run.fail(FailureClass.NETWORK).delay_seconds == 2
    assert run.fail(FailureClass.STORAGE).delay_seconds == 2
    assert run.fail(FailureClass.HANG).delay_seconds == 120
    assert run.fail(FailureClass.NETWORK).action == "stop"


def test_new_checkpoint_closes_the_breaker():
    run = Run()
    for _ in range(3):
        run.fail(FailureClass.NETWORK)
    assert run.fail(FailureClass.NETWORK, saves=True).delay_seconds == 2


def test_each_class_has_its_own_budget():
    run = Run(EXACT.model_copy(update={"breaker_failures": 9}))
    actions = [run.fail(FailureClass.NETWORK).action for _ in range(2)]
    assert actions == ["retry", "retry"]
    assert run.fail(FailureClass.STORAGE).action == "retry"
    assert run.fail(FailureClass.NETWORK).action == "stop"


def test_preemptions_do_not_use_the_crash_budget():
    run = Run()
    for _ in range(2):
        assert run.fail(FailureClass.PREEMPTION).action == "retry"
    assert [run.fail(FailureClass.NETWORK).delay_seconds for _ in range(2)] == [2, 4]
    assert run.fail(FailureClass.PREEMPTION).action == "stop"


def test_preemptions_may_have_their_own_budget():
    run = Run(EXACT.model_copy(update={"max_preemptions": 5}))
    assert [run.fail(FailureClass.PREEMPTION).action for _ in range(4)] == ["retry"] * 4
    assert run.fail(FailureClass.PREEMPTION).action == "stop"


def test_last_attempt_of_the_preemption_budget_may_be_on_demand():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True}))
    told = [run.fail(FailureClass.PREEMPTION) for _ in range(3)]
    assert [item.on_demand for item in told] == [False, True, False]
    assert [item.action for item in told] == ["retry", "retry_changed", "stop"]
    assert "on-demand" in told[1].reason


def test_breakers_last_try_may_be_on_demand_until_a_checkpoint():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True, "max_failures_per_class": 9}))
    lost = [run.fail(FailureClass.NODE_LOST) for _ in range(3)]
    assert [item.on_demand for item in lost] == [False, False, True]
    assert run.history.on_demand
    assert not run.fail(FailureClass.NODE_LOST, saves=True).on_demand
    assert not run.history.on_demand


def test_crash_keeps_the_placement():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True}))
    assert not any(run.fail(FailureClass.NETWORK).on_demand for _ in range(3))


def test_saving_a_step_again_is_not_progress():
    """A checkpoint that is lost and saved again must not keep a run alive forever."""
    run = Run()
    run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True)
    for _ in range(4):
        run.step = 0
        run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True)
    run.step = 0
    assert run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True).action == "stop"


def test_waits_double_up_to_a_minute():
    run = Run(EXACT.model_copy(update={"breaker_failures": 99, "max_failures_per_class": 99}))
    delays = [run.fail(FailureClass.NETWORK).delay_seconds for _ in range(80)]
    assert delays[:7] == [2, 4, 8, 16, 32, 60, 60]
    assert set(delays[5:]) == {60}


@given(run_id=st.text(max_size=9), failures=st.integers(1, 9))
def test_jitter_is_small_and_the_same_again(run_id, failures):
    lenient = RecoveryConfig(breaker_failures=99, max_failures_per_class=99)
    run = Run(lenient)
    for _ in range(failures):
        run.fail(FailureClass.NETWORK)
    delay = decide(run.history, run.failure, lenient, run_id).delay_seconds
    assert delay == decide(run.history, run.failure, lenient, run_id).delay_seconds
    assert 0.75 * min(60, 2**failures) <= delay <= min(60, 2**failures)


def test_jitter_differs_between_runs():
    run = Run(RecoveryConfig())
    run.fail(FailureClass.NETWORK)
    delays = {
        decide(run.history, run.failure, RecoveryConfig(), f"run-{number}").delay_seconds
        for number in range(20)
    }
    assert len(delays) == 20


def test_progress_after_a_fallback_to_an_older_checkpoint_counts():
    """After step 100 is damaged, failures below it must not count as stalled: there is progress."""
    run = Run()
    for _ in range(10):
        run.fail(FailureClass.NETWORK, saves=True)
    run.step = 50
    for _ in range(8):
        decision = run.fail(FailureClass.NETWORK, saves=True)
        assert decision.action == "retry"
        assert "1 of at most 3 in a row" in decision.reason
    assert run.history.last_step == run.step == 130


def test_settings_after_a_fallback_need_less_memory():
    run = Run()
    run.fail(FailureClass.NETWORK, saves=True)
    run.step = 0
    run.fail(FailureClass.NETWORK)
    assert run.history.last_step == 0


@pytest.mark.parametrize("back", [(90,), (90, 80), (90, 80, 70)])
def test_storage_that_damages_every_checkpoint_ends_the_run(back):
    run = Run()
    for _ in range(10):
        run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True)
    for count in range(40):
        run.step = back[count % len(back)]
        if run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True).action == "stop":
            return
    pytest.fail("it goes on for ever")


def test_restart_after_a_stop_gets_a_fresh_budget():
    run = Run()
    assert [run.fail(FailureClass.NETWORK).action for _ in range(4)][-1] == "stop"
    for _ in range(3):
        decision = run.fail(FailureClass.NETWORK)
        assert decision.action == "retry", decision.reason
    assert run.fail(FailureClass.NETWORK).action == "stop"
    assert len(run.history.stalled) == 4


def test_restart_after_a_divergence_may_skip_another_batch():
    run = Run()
    assert [run.fail(FailureClass.DIVERGENCE).action for _ in range(3)][-1] == "stop"
    assert run.fail(FailureClass.DIVERGENCE).skipped_batch is not None


def test_new_supervisor_of_a_run_that_was_not_stopped_gets_no_fresh_budget():
    run = Run()
    run.fail(FailureClass.NETWORK)
    run.fail(FailureClass.NETWORK)
    reader = History(list(run.history.attempts), list(run.history.decisions))
    assert len(reader.stalled) == 2


def test_crash_is_retried_within_its_budget():
    run = Run(replace_settings(max_failures_per_class=3, breaker_failures=9))
    decided = [run.fail(FailureClass.CRASH, at=at).action for at in (5, 9, 7)]
    assert decided == ["retry", "retry", "stop"]


def test_crash_at_the_same_step_again_stops_the_run():
    run = Run(replace_settings(max_failures_per_class=9, breaker_failures=9))
    assert run.fail(FailureClass.CRASH, at=5).action == "retry"
    assert run.fail(FailureClass.PREEMPTION, at=5).action == "retry"
    assert run.fail(FailureClass.CRASH, at=7).action == "retry"
    last = run.fail(FailureClass.CRASH, at=5)
    assert last.action == "stop"
    assert "after step 5 again" in last.reason


def test_crash_after_progress_counts_as_new():
    run = Run(replace_settings(max_failures_per_class=9, breaker_failures=9))
    run.fail(FailureClass.CRASH, at=5)
    assert run.fail(FailureClass.CRASH, saves=True, at=5).action == "retry"
