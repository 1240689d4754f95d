"""The policy on random histories: it always decides, ends, and overdraws no budget."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.components.shared.config import RecoveryConfig
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.policy import decide

from support.decided import BUDGETED, Run

FAULTS = st.tuples(st.sampled_from(list(FailureClass)), st.booleans(), st.booleans())


SETTINGS = st.builds(
    RecoveryConfig,
    max_failures_per_class=st.integers(1, 5),
    breaker_failures=st.integers(1, 6),
    jitter=st.booleans(),
)


@settings(deadline=None)
@given(faults=st.lists(FAULTS, max_size=30), recovery=SETTINGS, device=st.sampled_from(["cpu", ""]))
def test_any_history_gives_a_decision(faults, recovery, device):
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
        return self.most(kind) - self.failures[kind]

    def most(self, kind):
        """Return how many failures of a class stop the run."""
        if kind is FailureClass.DIVERGENCE:
            return 3
        limit = self.recovery.max_failures_per_class
        return min(2, limit) if kind is FailureClass.UNKNOWN else limit

    @property
    def left_to_the_breaker(self):
        """Return how many more failures the breaker allows, including its last try.

        Divergences have a limit of their own, which comes first.
        """
        crashes = sum(self.failures[kind] for kind in set(self.failures) - self.APART)
        return self.recovery.breaker_failures + 1 - crashes


@settings(deadline=None)
@given(faults=st.lists(FAULTS, max_size=30), recovery=SETTINGS, device=st.sampled_from(["cpu", ""]))
def test_no_budget_is_ever_exceeded(faults, recovery, device):
    run, spent = Run(recovery, device=device), Spent(recovery)
    for kind, saves, unexplained in faults:
        decision = run.fail(kind, saves=saves, unexplained=unexplained)
        spent.take(kind, decision, saves=saves)
        assert spent.left(kind) >= 0
        assert spent.left_to_the_breaker >= 0
        used, most = spent.failures[kind], spent.most(kind)
        if decision.action == "retry" and "retry unchanged" in decision.reason:
            assert spent.left(kind) > 0
            assert f"{used} of at most {most} in a row" in decision.reason
        if decision.action == "stop":
            break


@settings(deadline=None)
@given(data=st.data(), recovery=SETTINGS)
def test_runs_without_progress_always_end(data, recovery):
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
def test_run_with_progress_survives_any_number_of_faults(kinds):
    run = Run()
    assert all(run.fail(kind, saves=True).action != "stop" for kind in kinds)
