"""The supervisor, with stand-in ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.errors import BadInput, RunBusy, StorageError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    RecoveryDecision,
    Warned,
)
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage, s3
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.fallbacks import fallbacks_for
from steadytrain.components.train.recovery import watch

from support import command
from support.decided import halved
from support.proxy import proxy_to
from support.s3 import make_bucket, moto_server, set_credentials

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")
SUPERVISE = """
import os, sys
from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stopping import StopRequest
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.process import ProcessLauncher
from steadytrain.components.train.recovery.supervisor import Supervisor
StopRequest.wait = lambda request, seconds: seconds > 5 and os.kill(os.getpid(), 9)
config = load(sys.argv[1])
data = DataRecord.load(Workspace.of(config).record("preprocess"))
rank = [sys.executable, sys.argv[2], "kill_first"]
with ProcessLauncher(config.compute, rank, imports=()) as launcher:
    Supervisor(config, data, launcher).run()
"""


def events(workspace, kind):
    return [event for event in read_events(workspace.events) if isinstance(event, kind)]


def retry(*_):
    return RecoveryDecision("retry", "once more")


def test_run_finishes(supervisor, workspace):
    outcome = supervisor("finish").run()
    assert (outcome.outcome, outcome.step, outcome.attempts) == ("finished", 5, 1)
    assert outcome.succeeded
    (ended,) = events(workspace, AttemptEnded)
    assert (ended.outcome, ended.failure_class) == ("finished", "")


def test_error_that_training_survived_is_a_warning(supervisor, workspace):
    outcome = supervisor("finish_after_report").run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 1)
    warned = [event.message for event in events(workspace, Warned)]
    assert "CUDA out of memory.; but training went on, and succeeded" in warned[-1]


def test_ranks_get_everything_from_their_folder(supervisor, workspace, data):
    supervisor("finish").run()
    spec = AttemptSpec.load(AttemptFolder(workspace.attempts / "0001").spec)
    assert (spec.batch.micro_batch_size, spec.gradient_accumulation_steps) == (8, 1)
    assert spec.resume_from == ""
    assert spec.config == str(workspace.config)
    assert spec.data == str(workspace.record("preprocess"))


@pytest.mark.parametrize(
    ("how", "failure_class", "message"),
    [
        ("crash", "user_bug", "ZeroDivisionError: stand-in"),
        ("report", "gpu_oom", "OutOfMemoryError: CUDA out of memory."),
        ("kill", "host_oom", "SIGKILL"),
        ("finish_badly", "unknown", "exit status 7"),
    ],
)
def test_run_fails(supervisor, workspace, how, failure_class, message):
    outcome = supervisor(how).run()
    assert outcome.outcome == "failed"
    assert not outcome.succeeded
    assert outcome.failure.failure_class == failure_class
    assert message in outcome.failure.message
    ended = events(workspace, AttemptEnded)[-1]
    assert (ended.outcome, ended.failure_class) == ("failed", failure_class)
    assert ended.remedy


def test_crash_of_native_code_is_retried(supervisor, workspace):
    outcome = supervisor("segfault_first").run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    first, _ = events(workspace, AttemptEnded)
    assert (first.failure_class, first.step) == ("crash", 4)
    assert first.message == "the rank ended with SIGSEGV after step 4"


def test_crash_at_the_same_step_again_stops_the_run(supervisor):
    outcome = supervisor("segfault").run()
    assert (outcome.outcome, outcome.attempts) == ("failed", 2)
    assert outcome.failure.failure_class == "crash"
    assert "crash after step 4 again" in "; ".join(outcome.account)


def test_unrequested_preemption_is_retried(supervisor):
    """A reclaimed spot node signals the ranks. The supervisor itself gets no request.

    It continues on its own, and gives up if no attempt reaches a checkpoint.
    """
    running = supervisor("wait")

    class Preempt:
        def emit(self, event):
            if isinstance(event, AttemptStarted):
                threading.Thread(target=self.signal, args=[event.attempt]).start()

        def signal(self, attempt):
            folder = running.workspace.attempts / f"{attempt:04d}"
            command.wait_for((folder / "waiting-0").exists)
            for process in processes_of(folder):
                process.terminate()

        def close(self):
            pass

    running.sinks = [Preempt()]
    outcome = running.run()
    assert (outcome.outcome, outcome.attempts) == ("preempted", 3)
    assert outcome.failure.failure_class == "preemption"


def test_policy_retries(supervisor):
    outcome = supervisor("finish_second", decide=retry).run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)


def test_storage_that_is_away_between_attempts_is_waited_for(supervisor, workspace, monkeypatch):
    set_credentials(monkeypatch)
    monkeypatch.setattr(s3, "ATTEMPTS", 1)

    def decide(history, failure):
        proxy.queued.extend(["503"] * 2)
        return retry(history, failure)

    with moto_server() as port, proxy_to(port) as proxy:
        make_bucket(port, "bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
        recovery = {"checkpoints": "s3://bucket", "backoff_seconds": 0}
        outcome = supervisor("finish_second", decide=decide, recovery=recovery).run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    (told,) = events(workspace, Warned)
    assert told.message.startswith("waiting up to 3 min for the storage of the checkpoints")
    assert "SlowDown" in told.message


def test_retry_with_a_smaller_micro_batch_keeps_the_global_batch(supervisor, workspace):
    def halve(history, failure):
        return RecoveryDecision("retry_changed", "smaller", batch=BatchSettings(4))

    assert supervisor("finish_second", decide=halve).run().succeeded
    first, second = events(workspace, AttemptStarted)
    assert (first.batch.micro_batch_size, first.gradient_accumulation_steps) == (8, 1)
    assert (second.batch.micro_batch_size, second.gradient_accumulation_steps) == (4, 2)


def test_micro_batch_that_fits_is_learned_and_taken_up_by_the_next_run(supervisor, workspace):
    assert supervisor("fit").run().attempts == 3
    begun = events(workspace, AttemptStarted)
    assert [event.batch.micro_batch_size for event in begun] == [8, 4, 2]
    told = [event.reason for event in events(workspace, DecisionMade)]
    assert "8 x 1 becomes 4 x 2" in told[0]
    assert "4 x 2 becomes 2 x 4" in told[1]

    later = supervisor("fit", run="later")
    assert later.run().attempts == 1
    (begun,) = events(later.workspace, AttemptStarted)
    assert (begun.batch.micro_batch_size, begun.gradient_accumulation_steps) == (2, 4)
    (warned,) = events(later.workspace, Warned)
    assert "2 x 4" in warned.message
    assert "instead of 8 x 1" in warned.message
    assert later.ledger.history().limit.batch.micro_batch_size == 2

    other = supervisor("fit", run="other", model={"config": {"model_type": "gpt2"}})
    assert other.run().attempts == 3, "what one model taught says nothing about another"


def test_micro_batch_that_a_rank_halves_stays_halved(supervisor, workspace):
    """In the next attempt and in the next run; the supervisor records the rank's decisions."""
    first = supervisor("halve_first")
    outcome = first.run()
    assert (outcome.outcome, outcome.attempts) == ("finished", 2)
    begun = events(workspace, AttemptStarted)
    plans = [(item.batch, item.gradient_accumulation_steps) for item in begun]
    assert plans == [(BatchSettings(8), 1), (BatchSettings(2), 4)]
    history = first.ledger.history()
    assert [item.action for item in history.decisions] == ["repeat_step", "repeat_step", "retry"]
    assert str(history.attempts[0].plan) == "2 x 4"
    reasons = {item.field: item.reason for item in outcome.decisions}
    assert reasons["training.micro_batch_size"] == "repeat step: smaller micro-batch"

    later = supervisor("finish", run="later")
    later.run()
    assert events(later.workspace, AttemptStarted)[0].batch == BatchSettings(2)


def test_halving_that_a_dead_supervisor_did_not_record_is_known_to_the_next(supervisor, workspace):
    supervisor("crash").run()
    stream = workspace.stream("rank-1")
    stream.emit(halved(size=2))
    stream.close()
    supervisor("finish").run()
    assert events(workspace, AttemptStarted)[-1].batch == BatchSettings(2)


def test_learned_limit_stays_within_the_next_runs_own_bound(supervisor, workspace):
    supervisor("fit").run()
    small = supervisor("fit", run="small", training={"global_batch_size": 8, "micro_batch_size": 1})
    small.run()
    assert events(small.workspace, AttemptStarted)[0].batch.micro_batch_size == 1
    assert not events(small.workspace, Warned)


def test_final_oom_error_lists_every_attempt(supervisor):
    outcome = supervisor("report").run()
    assert (outcome.outcome, outcome.attempts) == ("failed", 5)
    text = "\n".join(outcome.account)
    for plan in ("8 x 1", "4 x 2", "2 x 4", "1 x 8", "1 x 8, activation checkpointing"):
        assert f"micro-batch x accumulation {plan}," in text
    for fallback in fallbacks_for(FailureClass.GPU_OOM, "GPU", ["ddp"]):
        assert fallback.name in text


def test_new_supervisor_continues_with_the_decision_of_a_dead_one(supervisor, workspace):
    def halve(history, failure):
        os.kill(os.getpid(), signal.SIGTERM)
        return RecoveryDecision("retry_changed", "smaller", delay_seconds=4, batch=BatchSettings(4))

    assert supervisor("crash", decide=halve).run().outcome == "preempted"
    assert supervisor("finish").run().attempts == 2
    (decided,) = events(workspace, DecisionMade)
    second = events(workspace, AttemptStarted)[1]
    assert second.time >= decided.time + decided.delay_seconds
    assert second.batch.micro_batch_size == 4


def test_supervisor_killed_while_waiting_to_retry(supervisor, workspace, data, config):
    recovery = config.recovery.model_copy(update={"backoff_seconds": 6.0, "jitter": False})
    config = config.model_copy(update={"recovery": recovery})
    workspace.create()
    workspace.config.write_text(config.to_yaml())
    data.save(workspace.record("preprocess"))
    program = [sys.executable, "-c", SUPERVISE, str(workspace.config), str(RANK)]
    assert subprocess.run(program, timeout=600).returncode == -9

    assert supervisor("kill_first").run().attempts == 2
    (decided,) = events(workspace, DecisionMade)
    first, second = supervisor("finish").ledger.history().attempts
    assert first.ended.failure_class == "host_oom"
    assert second.ended.outcome == "finished"
    assert second.started.time >= decided.time + decided.delay_seconds == decided.time + 6


def test_supervisor_stopped_while_waiting_to_retry(supervisor):
    def decide(history, failure):
        os.kill(os.getpid(), signal.SIGTERM)
        return RecoveryDecision("retry", "later", delay_seconds=600)

    outcome = supervisor("crash", decide=decide).run()
    assert (outcome.outcome, outcome.attempts) == ("preempted", 1)
    assert outcome.failure is None


def test_second_signal_skips_the_grace_period(supervisor, workspace, wait_for):
    running = supervisor("ignore")
    folder = workspace.attempts / "0001"

    def ask():
        # Two signals at once would be one. The first has arrived once the agent's order exists.
        for name in ("waiting-0", AttemptFolder(folder).leave.name):
            wait_for((folder / name).exists)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    running.config = running.config.model_copy(
        update={
            "recovery": running.config.recovery.model_copy(update={"stop_grace_seconds": 3600.0})
        }
    )
    outcome = running.run()
    thread.join()
    assert outcome.outcome == "stopped"
    assert not processes_of(folder)


def test_signal_handlers_are_restored(supervisor):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    supervisor("finish").run()
    assert {number: signal.getsignal(number) for number in before} == before


def test_supervisor_runs_outside_the_main_thread(supervisor):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(supervisor("finish").run()))
    thread.start()
    thread.join()
    assert outcomes[0].succeeded


def test_validation_callback_prunes_the_run(supervisor, workspace):
    outcome = supervisor("validate", on_validation=lambda event: event.metrics["loss"] > 0.2).run()
    assert outcome.outcome == "pruned"
    assert outcome.step >= 5


def test_callback_error_ends_the_ranks(supervisor, workspace):
    def broken(event):
        raise LookupError("the caller's own")

    with pytest.raises(LookupError):
        supervisor("validate", on_validation=broken).run()
    assert not processes_of(workspace.attempts)
    assert events(workspace, AttemptEnded)[-1].outcome == "stopped"
    assert supervisor("finish").run().attempts == 2


def test_run_whose_folder_is_deleted_ends_with_a_clear_error(supervisor, workspace, monkeypatch):
    """Its ranks trained on, and nobody saw it."""
    monkeypatch.setattr(watch, "DELETED_SECONDS", 0.2)
    running, folder = supervisor("wait"), workspace.attempts / "0001"

    def delete():
        while not (folder / "waiting-0").exists():
            threading.Event().wait(0.05)
        shutil.rmtree(workspace.folder, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    with pytest.raises(StorageError, match=f"{workspace.events}.* was deleted while"):
        running.run()
    thread.join()
    assert not processes_of(folder)


def test_failing_sink_is_dropped(supervisor, workspace):
    class Broken:
        calls = 0

        def emit(self, event):
            self.calls += 1
            raise OSError("no connection")

        def close(self):
            pass

    sink = Broken()
    assert supervisor("finish", sinks=[sink]).run().succeeded
    assert sink.calls == 1
    assert "Broken" in events(workspace, Warned)[0].message


def test_second_supervisor_is_rejected(supervisor, workspace):
    held = hold(LocalStorage(workspace.lease), run_id="tiny", seconds=60)
    with held, pytest.raises(RunBusy, match=str(os.getpid())):
        supervisor("finish").run()


def test_ledger_accepts_entries_after_a_lost_lease(supervisor, workspace):
    for _ in range(2):
        supervisor("crash").run()
    shutil.rmtree(workspace.lease)
    assert supervisor("finish").run().attempts == 5
    assert supervisor("finish").ledger.history().attempts[-1].ended.outcome == "finished"


def test_changed_data_under_the_same_name_are_rejected(supervisor, data):
    supervisor("crash").run()
    running = supervisor("finish")
    running.data = data.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(BadInput, match="other"):
        running.run()


def test_logging_intervals_may_change(supervisor):
    supervisor("crash").run()
    running = supervisor("finish")
    training = running.config.training.model_copy(update={"logging_steps": 3, "save_steps": 7})
    running.config = running.config.model_copy(
        update={"training": training, "run": running.config.run_id}
    )
    assert running.run().attempts == 3
