"""The policy: what follows a failure, based on the ledger's history alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
)
from steadytrain.components.sizing.batch import BatchPlan, plan_batch
from steadytrain.components.sizing.hardware import GIB
from steadytrain.components.train.failures import Failure, FailureClass
from steadytrain.components.train.recovery.fallbacks import (
    all_fallbacks,
    fallbacks_for,
    next_fallback,
)
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.policy import decide

EXACT = RecoveryConfig(jitter=False)
BUDGETED = [
    kind
    for kind in FailureClass
    if kind.retryable
    and kind not in (FailureClass.GPU_OOM, FailureClass.DIVERGENCE, FailureClass.CRASH)
]
AT_ONCE = [FailureClass.DATA, FailureClass.USER_BUG, FailureClass.UNKNOWN]


class Run:
    """A run as its ledger records it, which fails on request."""

    def __init__(self, settings=EXACT, *, batch=8, ranks=1, nodes=1, device="GPU"):
        self.settings, self.device, self.nodes = settings, device, nodes
        self.plan, self.history, self.step = plan_batch(batch, ranks, batch // ranks), History(), 0

    def fail(self, kind, *, saves=False, unexplained=False, memory_needed=0, at=None):
        number, plan = self.history.next_attempt, self.plan
        attempt = AttemptHistory(
            AttemptStarted(
                attempt=number,
                world_size=plan.world_size,
                batch=plan.settings,
                gradient_accumulation_steps=plan.gradient_accumulation_steps,
                resumed_from_step=self.step or None,
                device=self.device,
                nodes=self.nodes,
            )
        )
        if saves:
            self.step += 10
            attempt.checkpoints.append(
                CheckpointSaved(
                    attempt=number, step=self.step, checkpoint="c", bytes=1, seconds=0.1
                )
            )
        attempt.ended = AttemptEnded(
            attempt=number,
            outcome="failed",
            step=self.step if at is None else at,
            failure_class=kind,
        )
        self.history.attempts.append(attempt)
        self.failure = Failure(kind, 0, "told", "do this", unexplained=unexplained)
        self.failure = replace(self.failure, memory_needed=memory_needed)
        decision = decide(self.history, self.failure, self.settings, "run")
        self.history.decisions.append(
            DecisionMade(
                attempt=number,
                failure_class=kind,
                action=decision.action,
                reason=decision.reason,
                delay_seconds=decision.delay_seconds,
                batch=decision.batch,
                fallback=decision.fallback,
                skipped_batch=decision.skipped_batch,
                learning_rate_scale=decision.learning_rate_scale,
                nodes=decision.nodes,
                on_demand=decision.on_demand,
            )
        )
        if decision.nodes:
            self.plan = plan_batch(
                plan.global_batch_size, plan.world_size // self.nodes * decision.nodes
            )
            self.nodes = decision.nodes
        if decision.batch is not None:
            self.plan = plan.within(decision.batch)
        return decision


@pytest.mark.parametrize("kind", AT_ONCE)
def test_failure_that_would_repeat_stops_at_once(kind):
    assert Run().fail(kind).action == "stop"


@pytest.mark.parametrize("kind", sorted(set(BUDGETED) - {FailureClass.PREEMPTION}))
def test_three_in_a_row_open_the_breaker_and_its_last_try_stops_the_run(kind):
    run = Run()
    if kind is FailureClass.CHECKPOINT_CORRUPT:
        assert run.fail(kind).delay_seconds == 0
    delays = [run.fail(kind, unexplained=True).delay_seconds for _ in range(3)]
    assert delays == [2, 4, 120]
    last = run.fail(kind, unexplained=True)
    assert last.action == "stop"
    assert "breaker" in last.reason


def test_the_first_damaged_checkpoint_costs_nothing():
    run = Run(replace_settings(max_failures_per_class=1, breaker_failures=1))
    decision = run.fail(FailureClass.CHECKPOINT_CORRUPT)
    assert (decision.action, decision.delay_seconds) == ("retry", 0)
    assert "back to the newest intact checkpoint" in decision.reason
    assert "breaker" in run.fail(FailureClass.NETWORK).reason


def test_nodes_that_stay_away_are_done_without_down_to_what_is_allowed():
    run = Run(EXACT.model_copy(update={"min_nodes": 2}), batch=24, ranks=8, nodes=4)
    assert [run.fail(FailureClass.PENDING_TIMEOUT).nodes for _ in range(3)] == [3, 2, None]
    assert run.plan.global_batch_size == 24
    assert run.plan.world_size == 4
    assert run.history.nodes == 2
    reasons = [item.reason for item in run.history.decisions]
    assert "on 3 nodes instead of 4" in reasons[0]
    assert reasons[2].startswith("pending_timeout, 1 of at most 3 in a row")


def test_a_number_of_nodes_that_does_not_divide_the_batch_is_passed_over():
    run = Run(EXACT.model_copy(update={"min_nodes": 1}), batch=32, ranks=4, nodes=4)
    assert [run.fail(FailureClass.PENDING_TIMEOUT).nodes for _ in range(3)] == [2, 1, None]


def test_unless_it_is_allowed_all_nodes_are_waited_for():
    assert Run(batch=32, ranks=4, nodes=4).fail(FailureClass.PENDING_TIMEOUT).nodes is None


def test_the_breaker_counts_over_the_classes():
    run = Run()
    assert run.fail(FailureClass.NETWORK).delay_seconds == 2
    assert run.fail(FailureClass.STORAGE).delay_seconds == 2
    assert run.fail(FailureClass.HANG).delay_seconds == 120
    assert run.fail(FailureClass.NETWORK).action == "stop"


def test_a_new_checkpoint_closes_the_breaker():
    run = Run()
    for _ in range(3):
        run.fail(FailureClass.NETWORK)
    assert run.fail(FailureClass.NETWORK, saves=True).delay_seconds == 2


def test_a_class_has_a_budget_of_its_own():
    run = Run(EXACT.model_copy(update={"breaker_failures": 9}))
    actions = [run.fail(FailureClass.NETWORK).action for _ in range(2)]
    assert actions == ["retry", "retry"]
    assert run.fail(FailureClass.STORAGE).action == "retry"
    assert run.fail(FailureClass.NETWORK).action == "stop"


def test_preemptions_do_not_eat_the_budget_of_crashes():
    run = Run()
    for _ in range(2):
        assert run.fail(FailureClass.PREEMPTION).action == "retry"
    assert [run.fail(FailureClass.NETWORK).delay_seconds for _ in range(2)] == [2, 4]
    assert run.fail(FailureClass.PREEMPTION).action == "stop"


def test_preemptions_may_have_a_budget_of_their_own():
    run = Run(EXACT.model_copy(update={"max_preemptions": 5}))
    assert [run.fail(FailureClass.PREEMPTION).action for _ in range(4)] == ["retry"] * 4
    assert run.fail(FailureClass.PREEMPTION).action == "stop"


def test_the_last_attempt_that_preemptions_leave_may_be_on_demand():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True}))
    told = [run.fail(FailureClass.PREEMPTION) for _ in range(3)]
    assert [item.on_demand for item in told] == [False, True, False]
    assert [item.action for item in told] == ["retry", "retry_changed", "stop"]
    assert "on-demand" in told[1].reason


def test_so_may_the_breakers_last_try_and_a_checkpoint_leads_back():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True, "max_failures_per_class": 9}))
    lost = [run.fail(FailureClass.NODE_LOST) for _ in range(3)]
    assert [item.on_demand for item in lost] == [False, False, True]
    assert run.history.on_demand
    assert not run.fail(FailureClass.NODE_LOST, saves=True).on_demand
    assert not run.history.on_demand


def test_a_crash_moves_nothing():
    run = Run(EXACT.model_copy(update={"on_demand_at_last": True}))
    assert not any(run.fail(FailureClass.NETWORK).on_demand for _ in range(3))


def test_a_step_that_is_saved_a_third_time_is_no_progress():
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


def test_jitter_scatters_runs():
    run = Run(RecoveryConfig())
    run.fail(FailureClass.NETWORK)
    delays = {
        decide(run.history, run.failure, RecoveryConfig(), f"run-{number}").delay_seconds
        for number in range(20)
    }
    assert len(delays) == 20


def test_fallbacks_are_tried_in_order_and_listed_at_the_end():
    run = Run()
    walked = []
    needed = 30 * GIB
    while (decision := run.fail(FailureClass.GPU_OOM, memory_needed=needed)).action != "stop":
        assert (decision.action, decision.delay_seconds) == ("retry_changed", 0)
        walked.append(str(run.plan))
        assert run.plan.global_batch_size == 8
    assert walked == ["4 x 2", "2 x 4", "1 x 8", "1 x 8, activation checkpointing"]
    for fallback in fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"]):
        assert fallback.name in decision.reason
    assert "FSDP: nothing left to reduce" in decision.reason
    assert "4 x 2 ended with gpu_oom at step 0" in decision.reason
    assert "about 32.2 GB" in decision.reason
    assert "smallest GPU with enough memory: A100-40 (40 GB)" in decision.reason


@pytest.mark.parametrize(
    ("begins", "device", "walked"),
    [
        ("ddp", "GPU", ["fsdp", "fsdp, offload all"]),
        ("ddp", "cpu", ["fsdp"]),
        ("zero1", "GPU", ["zero2", "zero3", "zero3, offload all"]),
        ("zero2", "cpu", ["zero3"]),
        ("fsdp", "cpu", []),
    ],
)
def test_several_ranks_share_more_and_more_of_the_state(begins, device, walked):
    run = Run(batch=2, ranks=2, device=device)
    run.plan = run.plan.changed(strategy=begins, gradient_checkpointing=True)
    found = []
    while (decision := run.fail(FailureClass.GPU_OOM)).action != "stop":
        found.append(str(run.plan).removeprefix("1 x 1, activation checkpointing, "))
    assert found == walked
    assert ("this memory is host memory" in decision.reason) == (device == "cpu")


def test_a_rung_that_would_not_help_is_passed_over():
    """In the plan's estimate, weights and moments need most memory at any micro-batch."""
    needed = {4: 990, 2: 985, 1: 980}

    def estimate(plan):
        return needed[plan.micro_batch_size] - (500 if plan.settings.strategy == "fsdp" else 0)

    plan = plan_batch(8, 2, 4)
    found = fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"])
    fallback, lowered = next_fallback(plan, found, estimate)
    assert (fallback.name, str(lowered)) == ("FSDP", "4 x 1, fsdp")
    fallback, _ = next_fallback(plan, found)
    assert fallback.name == "smaller micro-batch"


def test_option_without_sharding_support_skips_the_sharding_fallback():
    conflicts = {"fsdp": "training.fp16", "cpu": ""}
    found = fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"], conflict_with=conflicts.get)
    plan = plan_batch(2, 2).changed(gradient_checkpointing=True)
    assert next_fallback(plan, found) is None
    assert {fallback.name: fallback.missing for fallback in found}[
        "FSDP"
    ] == "not with training.fp16"


def test_a_divergence_skips_then_slows_then_stops():
    run = Run()
    first, second, third = (run.fail(FailureClass.DIVERGENCE) for _ in range(3))
    assert (first.skipped_batch, first.learning_rate_scale) == (0, 1)
    assert (second.skipped_batch, second.learning_rate_scale) == (None, 0.1)
    assert third.action == "stop"
    assert run.history.skipped_batches == (0,)
    assert run.history.learning_rate_scale == 0.1


def test_after_a_new_checkpoint_a_divergence_is_the_first_again():
    run = Run()
    run.fail(FailureClass.DIVERGENCE)
    again = run.fail(FailureClass.DIVERGENCE, saves=True)
    assert again.skipped_batch == 1, "the batch that is taken where the first is left out"


def test_rungs_are_no_attempts():
    run = Run()
    for kind in (FailureClass.NETWORK, FailureClass.GPU_OOM) * 2:
        assert run.fail(kind).action != "stop"
    assert run.fail(FailureClass.NETWORK).delay_seconds == 120


NO_SNAPSHOT = "8 x 1, no snapshot in host memory"
SMALLER = ["4 x 2, ", "2 x 4, ", "1 x 8, ", "1 x 8, activation checkpointing, "]


@pytest.mark.parametrize(
    ("device", "walked"),
    [
        ("cpu", [NO_SNAPSHOT, *(f"{plan}no snapshot in host memory" for plan in SMALLER)]),
        ("NVIDIA H100", [NO_SNAPSHOT]),
    ],
)
def test_host_memory_is_no_matter_of_the_micro_batch_unless_on_the_cpu(device, walked):
    run, found = Run(device=device), []
    while (decision := run.fail(FailureClass.HOST_OOM)).fallback:
        assert (decision.action, decision.delay_seconds) == ("retry_changed", 0)
        assert run.plan.global_batch_size == 8
        found.append(str(run.plan))
    assert found == walked
    if device == "cpu":
        assert decision.action == "stop"
        assert "no snapshot in host memory: 8 x 1, no snapshot in host memory ended with" in (
            decision.reason
        )
    else:
        assert (decision.action, decision.delay_seconds) == ("retry", 2)
        assert run.fail(FailureClass.HOST_OOM).delay_seconds == 4


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100"])
def test_rank_killed_for_an_unknown_reason_changes_nothing(device):
    assert Run(device=device).fail(FailureClass.HOST_OOM, unexplained=True).action == "retry"


def test_what_was_lowered_stays_lowered():
    """The fallbacks for one memory stay in effect when the other memory runs out."""
    run = Run(device="NVIDIA H100")
    kinds = [FailureClass.GPU_OOM, FailureClass.HOST_OOM, FailureClass.GPU_OOM]
    plans = []
    for kind in kinds:
        run.fail(kind)
        plans.append(str(run.plan))
    copied, in_place = "4 x 2", "no snapshot in host memory"
    assert plans == [copied, f"{copied}, {in_place}", f"2 x 4, {in_place}"]


@given(share=st.integers(1, 500), world=st.integers(1, 64))
def test_the_ladder_ends_and_keeps_the_global_batch(share, world):
    plan, fallbacks = BatchPlan(BatchSettings(share), 1, world), 0
    known = [item for item in all_fallbacks(["ddp", "fsdp"]) if item.memory == "device"]
    while found := next_fallback(plan, known):
        _, lowered = found
        assert lowered.global_batch_size == share * world
        assert lowered.micro_batch_size <= max(1, plan.micro_batch_size // 2)
        plan, fallbacks = lowered, fallbacks + 1
    shared = world > 1
    assert fallbacks <= share.bit_length() + 2 * shared
    own = plan.settings
    assert (own.micro_batch_size, own.gradient_checkpointing) == (1, True)
    assert (own.strategy, own.offload) == (("fsdp", "all") if shared else ("ddp", "none"))


FAULTS = st.tuples(st.sampled_from(list(FailureClass)), st.booleans(), st.booleans())
SETTINGS = st.builds(
    RecoveryConfig,
    max_failures_per_class=st.integers(1, 5),
    breaker_failures=st.integers(1, 6),
    jitter=st.booleans(),
)


@settings(deadline=None)
@given(faults=st.lists(FAULTS, max_size=30), recovery=SETTINGS, device=st.sampled_from(["cpu", ""]))
def test_any_history(faults, recovery, device):
    run = Run(recovery, device=device)
    for kind, saves, unexplained in faults:
        decision = run.fail(kind, saves=saves, unexplained=unexplained)
        before = History(list(run.history.attempts), run.history.decisions[:-1])
        assert decide(before, run.failure, recovery, "run") == decision
        longest = max(recovery.backoff_max_seconds, recovery.breaker_reset_seconds)
        assert 0 <= decision.delay_seconds <= longest
        assert decision.reason
        if decision.action == "stop":
            break


class Spent:
    """What a run has used of its budgets since its last new checkpoint, counted without the policy.

    It counts by class. The failure of the attempt that saved is the first one that counts. The
    breaker allows a last try whatever a class has left, so that failure counts for the breaker.
    """

    APART = frozenset({FailureClass.PREEMPTION, FailureClass.DIVERGENCE})

    def __init__(self, recovery):
        self.recovery, self.failures, self.last_try = recovery, Counter(), False

    def take(self, kind, decision, *, saves):
        if saves:
            self.failures.clear()
            self.last_try = False
        if not decision.fallback and "back to the newest intact" not in decision.reason:
            breakers_own = self.last_try and kind not in self.APART
            self.failures["last try" if breakers_own else kind] += 1
        self.last_try |= "breaker is open" in decision.reason

    def left(self, kind):
        """Return how many more failures a class may have. A third divergence stops the run."""
        most = 3 if kind is FailureClass.DIVERGENCE else self.recovery.max_failures_per_class
        return most - self.failures[kind]

    @property
    def left_to_the_breaker(self):
        """Return how many more failures the breaker allows, including its last try.

        Divergences have a limit of their own, which comes first.
        """
        crashes = sum(self.failures[kind] for kind in set(self.failures) - self.APART)
        return self.recovery.breaker_failures + 1 - crashes


@settings(deadline=None)
@given(faults=st.lists(FAULTS, max_size=30), recovery=SETTINGS, device=st.sampled_from(["cpu", ""]))
def test_no_budget_is_ever_overdrawn(faults, recovery, device):
    run, spent = Run(recovery, device=device), Spent(recovery)
    for kind, saves, unexplained in faults:
        decision = run.fail(kind, saves=saves, unexplained=unexplained)
        spent.take(kind, decision, saves=saves)
        assert spent.left(kind) >= 0
        assert spent.left_to_the_breaker >= 0
        used, most = spent.failures[kind], recovery.max_failures_per_class
        if decision.action == "retry" and "retry unchanged" in decision.reason:
            assert spent.left(kind) > 0
            assert f"{used} of at most {most} in a row" in decision.reason
        if decision.action == "stop":
            break


@settings(deadline=None)
@given(data=st.data(), recovery=SETTINGS)
def test_without_progress_it_always_ends(data, recovery):
    run = Run(recovery)
    fallbacks = 5  # from micro-batch 8: 4, 2, 1, activation checkpointing, no snapshot
    divergences = 3
    first_damage = 1
    most = recovery.max_failures_per_class + recovery.breaker_failures + 1
    most += fallbacks + divergences + first_damage
    for _ in range(most):
        if run.fail(data.draw(st.sampled_from(list(FailureClass)))).action == "stop":
            return
    pytest.fail("it goes on for ever")


@given(kinds=st.lists(st.sampled_from(BUDGETED), min_size=1, max_size=60))
def test_with_progress_between_them_a_run_survives_any_number_of_faults(kinds):
    run = Run()
    assert all(run.fail(kind, saves=True).action != "stop" for kind in kinds)


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


def test_what_is_left_after_a_fallback_is_less():
    run = Run()
    run.fail(FailureClass.NETWORK, saves=True)
    run.step = 0
    run.fail(FailureClass.NETWORK)
    assert run.history.last_step == 0


@pytest.mark.parametrize("back", [(90,), (90, 80), (90, 80, 70)])
def test_storage_that_damages_every_checkpoint_does_not_keep_a_run_busy_forever(back):
    run = Run()
    for _ in range(10):
        run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True)
    for count in range(40):
        run.step = back[count % len(back)]
        if run.fail(FailureClass.CHECKPOINT_CORRUPT, saves=True).action == "stop":
            return
    pytest.fail("it goes on for ever")


def test_who_starts_a_run_again_after_a_stop_gets_a_fresh_budget():
    run = Run()
    assert [run.fail(FailureClass.NETWORK).action for _ in range(4)][-1] == "stop"
    for _ in range(3):
        decision = run.fail(FailureClass.NETWORK)
        assert decision.action == "retry", decision.reason
    assert run.fail(FailureClass.NETWORK).action == "stop"
    assert len(run.history.stalled) == 4


def test_after_a_divergence_stopped_it_a_new_start_may_leave_out_another_batch():
    run = Run()
    assert [run.fail(FailureClass.DIVERGENCE).action for _ in range(3)][-1] == "stop"
    assert run.fail(FailureClass.DIVERGENCE).skipped_batch is not None


def test_a_new_supervisor_of_a_run_that_was_not_stopped_gets_no_fresh_budget():
    run = Run()
    run.fail(FailureClass.NETWORK)
    run.fail(FailureClass.NETWORK)
    reader = History(list(run.history.attempts), list(run.history.decisions))
    assert len(reader.stalled) == 2


def test_a_crash_is_retried_within_its_budget():
    run = Run(replace_settings(max_failures_per_class=3, breaker_failures=9))
    decided = [run.fail(FailureClass.CRASH, at=at).action for at in (5, 9, 7)]
    assert decided == ["retry", "retry", "stop"]


def test_a_crash_at_the_same_step_again_stops_the_run():
    run = Run(replace_settings(max_failures_per_class=9, breaker_failures=9))
    assert run.fail(FailureClass.CRASH, at=5).action == "retry"
    assert run.fail(FailureClass.PREEMPTION, at=5).action == "retry"
    assert run.fail(FailureClass.CRASH, at=7).action == "retry"
    last = run.fail(FailureClass.CRASH, at=5)
    assert last.action == "stop"
    assert "after step 5 again" in last.reason


def test_a_crash_after_progress_is_a_new_one():
    run = Run(replace_settings(max_failures_per_class=9, breaker_failures=9))
    run.fail(FailureClass.CRASH, at=5)
    assert run.fail(FailureClass.CRASH, saves=True, at=5).action == "retry"


def replace_settings(**fields):
    return EXACT.model_copy(update=fields)
