"""Where the time went: spans that add up, checked against runs simulated step by step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.times import (
    Times,
    last_sign_of_life,
    spans,
    unrecorded,
)

STEP, SAVE, START, LEAVE = 1.0, 0.25, 7.0, 0.5


def started(attempt, time, resumed=0):
    return AttemptStarted(
        time=time,
        attempt=attempt,
        world_size=1,
        batch=BatchSettings(2),
        gradient_accumulation_steps=2,
        resumed_from_step=resumed or None,
    )


def ready(attempt, time, step=0):
    return TrainingStarted(
        time=time, attempt=attempt, step=step, max_steps=99, parameters=1, device="", precision=""
    )


def saved(attempt, time, step, seconds=SAVE):
    return CheckpointSaved(
        time=time, attempt=attempt, step=step, checkpoint="c", bytes=1, seconds=seconds
    )


def ended(attempt, time, step, outcome="failed"):
    return AttemptEnded(time=time, attempt=attempt, outcome=outcome, step=step)


@dataclass
class Played:
    """A run, simulated step by step, which keeps its own books.

    taken: for each step, the seconds of each time that it ran.
    """

    save_every: int
    clock: float = 1000.0
    history: History = field(default_factory=History)
    checkpoints: list[int] = field(default_factory=lambda: [0])
    taken: dict[int, list[float]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    unusable: float = 0.0

    def spend(self, kind, seconds):
        self.spent[kind] += seconds
        self.clock += seconds

    def attempt(self, steps, *, comes_to_its_first_step=True, outcome="failed", damaged=0):
        """Run steps from the newest checkpoint that is not among the `damaged` newest, then end."""
        del self.checkpoints[max(1, len(self.checkpoints) - damaged) :]
        step = self.checkpoints[-1]
        number = self.history.next_attempt
        for later in range(step + 1, max(self.taken, default=0) + 1):
            self.unusable += sum(self.taken.pop(later, []))
        one = AttemptHistory(started(number, self.clock, step))
        self.history.attempts.append(one)
        self.spend("restarting", START)
        if comes_to_its_first_step:
            one.ready = ready(number, self.clock, step)
            for _ in range(steps):
                step += 1
                self.clock += STEP
                self.taken.setdefault(step, []).append(STEP)
                if step % self.save_every == 0:
                    self.spend("checkpointing", SAVE)
                    one.checkpoints.append(saved(number, self.clock, step))
                    self.checkpoints.append(step)
            if outcome == "finished":
                self.spend("checkpointing", SAVE)
                one.checkpoints.append(saved(number, self.clock, step + 1))
                self.spent["useful"] += LEAVE
            else:
                self.spent["lost"] += LEAVE
        else:
            self.spent["restarting"] += LEAVE
        self.clock += LEAVE
        one.ended = ended(number, self.clock, step, outcome)

    def books(self):
        """Return seconds by kind. Of a repeated step, only the last run counts, if it was kept."""
        finished = self.history.attempts[-1].ended.outcome == "finished"
        kept = math.inf if finished else self.checkpoints[-1]
        useful = sum(sum(times) for step, times in self.taken.items() if step <= kept)
        gone = sum(sum(times) for step, times in self.taken.items() if step > kept)
        return self.spent | {
            "useful": self.spent["useful"] + useful,
            "lost": self.spent["lost"] + gone + self.unusable,
        }


KINDS = ("useful", "lost", "restarting", "checkpointing", "waiting")
FAULTS = st.lists(
    st.tuples(
        st.integers(0, 25),  # steps that it runs
        st.booleans(),
        st.integers(0, 3),  # newest checkpoints that are damaged
        st.floats(0, 130),  # wait before the next attempt
    ),
    max_size=8,
)


@pytest.mark.parametrize("write", [0.5, 2.0, 3.0, 11.0])
def test_writer_waits_are_counted_where_they_occur(write):
    """Each save waits for the one before it, however long that one writes during training."""
    clock, waited, under_way = 1000.0, 0.0, None
    one = AttemptHistory(started(1, clock), ready(1, clock))

    def settle():
        nonlocal clock, waited
        step, committed = under_way
        waited = max(0.0, committed - clock)
        clock += waited
        told = saved(1, committed, step, SAVE + waited)
        one.checkpoints.append(
            dataclasses.replace(told, writing_seconds=write, waited_seconds=waited)
        )

    for step in range(1, 9):
        clock += STEP
        if step % 2 == 0:
            if under_way:
                settle()
            clock += SAVE
            under_way = step, clock + write
    settle()
    one.ended = ended(1, clock, 8, "finished")
    cut = spans(History([one]))
    assert all(before.end == after.start for before, after in pairwise(cut))
    times = Times.of(cut)
    assert times.checkpointing == pytest.approx(sum(item.seconds for item in one.checkpoints))
    assert times.useful == pytest.approx(8 * STEP)
    assert times.wall == pytest.approx(clock - 1000)


@given(faults=FAULTS, save_every=st.integers(1, 9), finishes=st.booleans())
def test_simulated_run_is_reported_as_it_happened(faults, save_every, finishes):
    run = Played(save_every)
    for steps, comes, damaged, wait in faults:
        run.attempt(steps, comes_to_its_first_step=comes, damaged=damaged)
        run.spend("waiting", wait)
    run.attempt(12, outcome="finished" if finishes else "failed")
    times = Times.of(spans(run.history))
    for kind, seconds in run.books().items():
        assert getattr(times, kind) == pytest.approx(seconds, abs=1e-6), kind
    assert times.wall == pytest.approx(run.clock - 1000)
    assert times.goodput == pytest.approx(times.useful / (run.clock - 1000))


MOMENTS = st.floats(0, 1e6)
ATTEMPTS = st.lists(
    st.tuples(
        MOMENTS,
        st.integers(0, 50),
        st.one_of(st.none(), MOMENTS),
        st.lists(st.tuples(MOMENTS, st.integers(1, 60), st.floats(0, 500)), max_size=5),
        st.one_of(st.none(), st.tuples(MOMENTS, st.integers(0, 60))),
        st.sampled_from(["finished", "failed", "preempted", "stopped"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(attempts=ATTEMPTS, until=MOMENTS)
def test_spans_are_contiguous_and_add_up_for_any_clock(attempts, until):
    history = History()
    for number, (start, resumed, first, saves, end, outcome) in enumerate(attempts, 1):
        history.attempts.append(
            AttemptHistory(
                started(number, start, resumed),
                None if first is None else ready(number, first, resumed),
                [saved(number, *save) for save in saves],
                end and ended(number, *end, outcome),
            )
        )
    cut = spans(history, until=until)
    assert all(span.seconds > 0 for span in cut)
    assert all(before.end == after.start for before, after in pairwise(cut))
    times = Times.of(cut)
    if cut:
        assert cut[0].start == attempts[0][0]
        assert times.wall == pytest.approx(cut[-1].end - cut[0].start)
    assert 0 <= times.goodput <= 1 + 1e-9


def test_no_attempt_takes_no_time():
    assert spans(History()) == []
    assert Times.of([]).goodput == 0


def test_running_attempt_counts_to_its_last_heartbeat():
    history = History([AttemptHistory(started(1, 100), ready(1, 110), [saved(1, 130, 20, 5)])])
    assert Times.of(spans(history)) == Times(useful=15, restarting=10, checkpointing=5)
    assert Times.of(spans(history, until=150)).useful == 35


def test_saved_but_unrecorded_work_partly_survives():
    """The supervisor died after a save at step 30 that its ledger does not contain."""
    history = History(
        [
            AttemptHistory(started(1, 0), ready(1, 10), [saved(1, 30, 20, 0)], ended(1, 50, 40)),
            AttemptHistory(started(2, 60, 30), ready(2, 70), [], ended(2, 90, 50, "finished")),
        ]
    )
    times = Times.of(spans(history))
    assert times == Times(useful=20 + 10 + 20, lost=10, restarting=20, waiting=10)


def test_cost_excludes_waits():
    times = Times(useful=3600, lost=1800, restarting=1800, waiting=999_999)
    assert times.cost(8) == 16


def test_unrecorded_attempts_of_a_dead_supervisor_are_found_in_events():
    attempt = AttemptHistory(started(2, 100, 10), None, [saved(2, 120, 20)])
    late = saved(2, 130, 30)
    begun = ready(2, 105)
    told = [saved(1, 99, 10), begun, saved(2, 120, 20), late, point(2, 140, 37), point(1, 150, 99)]
    assert unrecorded(attempt, told) == [begun, late]
    assert last_sign_of_life(attempt, told) == (140, 37)
    assert last_sign_of_life(attempt, []) == (100, 20)


def point(attempt, time, step):
    return TrainingStep(
        time=time,
        attempt=attempt,
        step=step,
        epoch=0.1,
        loss=1.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=1,
        tokens_per_second=1.0,
        gpu_memory_used=0,
        memory_used=1,
    )


@pytest.mark.parametrize("jump", [3600.0, 31 * 86_400.0])
@pytest.mark.parametrize("after", [0, 1, 5, 9, 12], ids="step {}".format)
def test_time_that_the_clock_jumps_over_is_nobodys(jump, after):
    """The clock is set forward while an attempt is at a step; its own seconds are right."""
    run = Played(4)
    run.attempt(9)
    run.spend("waiting", 30)
    run.attempt(12, outcome="finished")
    right = Times.of(spans(run.history))

    def moved(event):
        return dataclasses.replace(event, time=event.time + jump * (event.step > after))

    late, seconds = run.history.attempts[1], run.clock - run.history.attempts[1].started.time
    late.ready = moved(late.ready) if after < 8 else late.ready
    late.checkpoints = [moved(event) for event in late.checkpoints]
    late.ended = dataclasses.replace(late.ended, time=late.ended.time + jump, seconds=seconds)
    cut = spans(run.history)

    assert all(before.end == after.start for before, after in pairwise(cut))
    assert cut[-1].end == late.ended.time
    times = Times.of(cut)
    assert times.wall == pytest.approx(right.wall)
    assert times.useful == pytest.approx(right.useful, abs=START + 2 * SAVE)
    assert times.cost(60) == pytest.approx(right.cost(60))


def test_time_of_a_stalled_rank_is_lost():
    """Resumed to dump its stacks, the rank committed a checkpoint before it was killed."""
    hung = AttemptHistory(started(1, 100), ready(1, 107))
    hung.checkpoints = [saved(1, 110.25, 3), saved(1, 720, 4)]
    hung.ended = dataclasses.replace(ended(1, 721, 4), still_since=112.0)
    again = AttemptHistory(started(2, 723, 4), ready(2, 730, 4))
    again.ended = ended(2, 740, 9, "finished")

    times = Times.of(spans(History([hung, again])))

    assert times == Times(
        useful=3 + 1.75 + 10, lost=609, restarting=14, checkpointing=SAVE, waiting=2
    )
