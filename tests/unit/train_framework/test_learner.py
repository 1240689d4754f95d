"""A learner gets the loop: order, checkpoints, exact resume, divergence, the best model, stops."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RecoveryConfig, from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    TrainingDiverged,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.train.attempt import (
    AttemptFolder,
    AttemptResult,
    AttemptSpec,
    Beat,
)
from steadytrain.components.train.checkpoint import Checkpoint, checkpoints_of, newest
from steadytrain.components.train.failures import Diverged, Failure, FailureClass
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain.components.train.framework.ensemble import EnsembleLearner
from steadytrain.components.train.framework.rank import LearnerRank
from steadytrain.components.train.loop.process import serve
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.policy import decide

from support.snippets import blocks
from support.training import CLASSES, Bench, class_rows, events_of, write_data

RECIPE = {
    "max_steps": 12,
    "global_batch_size": 4,
    "eval_steps": 4,
    "save_steps": 3,
    "logging_steps": 1,
}


class Line:
    """Fits the mean label with one weight, so that every step and its order show in the weight."""

    metric, greater_is_better, parameters = "loss", False, 1

    def __init__(self, config, data):
        self.weight, self.steps, self.rate = np.zeros(1), 0, 0.1

    def learn(self, rows, *, learning_rate_scale):
        mean = float(np.mean([row["label"] for row in rows]))
        loss = (mean - float(self.weight[0])) ** 2
        rate = self.rate * learning_rate_scale
        self.weight += rate * (mean - self.weight)
        self.steps += 1
        return Learned(loss, rate)

    def validate(self, rows):
        labels = [row["label"] for row in rows]
        return {"loss": float(np.mean((labels - self.weight) ** 2)), "rows": float(len(labels))}

    def state(self):
        return {"weight": self.weight, "steps": np.array(self.steps)}

    def restore(self, state):
        self.weight, self.steps = state["weight"], int(state["steps"])

    def export(self, folder):
        (folder / "line.json").write_text(json.dumps(float(self.weight[0])))


@pytest.fixture
def bench(tmp_path):
    data = write_data(
        tmp_path / "data", class_rows(40), class_rows(9, seed=1), schema=CLASSES, tokenizer=False
    )

    def make(name="line", **training):
        return Bench.make(tmp_path / name, data, training={**RECIPE, **training})

    return make


def train(bench, learner=Line, number=1, resume_from=None, **spec):
    """Run one attempt in this process."""
    folder = AttemptFolder(bench.attempt(number, resume_from=resume_from))
    changed = AttemptSpec.load(folder.spec).model_copy(update=spec)
    changed.save(folder.spec)
    rank = LearnerRank(folder, f"{learner.__module__}:{learner.__qualname__}")
    rank.load = lambda: learner
    return rank, rank.run()


def exported(bench):
    return json.loads((bench.workspace.model / "line.json").read_text())


def test_learner_trains_reports_and_is_exported(bench):
    done = bench()
    rank, outcome = train(done)
    result = AttemptResult.load(rank.folder.result)
    assert (outcome, result.outcome, result.step, result.parameters) == (*["finished"] * 2, 12, 1)
    assert result.metric == "loss"
    assert [event.step for event in events_of(done.workspace, TrainingStep)] == [*range(1, 13)]
    assert [event.metrics["rows"] for event in events_of(done.workspace, Validated)] == [9] * 3
    assert events_of(done.workspace, TrainingStarted)[0].max_steps == 12
    scores = {event.step: event.metrics["loss"] for event in events_of(done.workspace, Validated)}
    assert result.best_score == min(scores.values()) == scores[result.best_step]


def test_step_of_an_ensembles_member_is_a_sign_of_life(bench):
    beats = []

    class Member(Line):
        def learn(self, rows, *, learning_rate_scale):
            beats.append(Beat.read(heartbeat).phase)
            return super().learn([{"label": 1.0}], learning_rate_scale=learning_rate_scale)

    class Ensemble(EnsembleLearner):
        def member(self, index):
            return Member(self.configs[index], self.data)

        def model_of(self, member):
            return member.weight

        def export(self, folder):
            (folder / "line.json").write_text(json.dumps([float(it[0]) for it in self.models]))

    members = [{"framework": "sklearn", "config": {"model_type": "linear"}, "max_steps": 3}]
    done = bench(max_steps=1)
    config = done.config.model_dump(mode="json")
    given = {"model_type": "ensemble", "members": members}
    config["model"] = {"framework": "ensemble", "config": given}
    done = dataclasses.replace(done, config=from_mapping(config))
    heartbeat = AttemptFolder(done.attempt()).heartbeat(0)
    train(done, Ensemble)
    # The hang timeout begins again with each of its steps.
    assert beats == ["start", "train", "train"]
    assert exported(done) == [pytest.approx(1 - 0.9**3)]


def test_started_names_the_device_that_the_learner_uses(bench, tmp_path, monkeypatch):
    class OnCpu(Line):
        on_cpu = True

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for learner, device in ((Line, "NVIDIA A100-SXM4-80GB"), (OnCpu, "cpu")):
        done = bench(learner.__name__)
        train(done, learner)
        assert events_of(done.workspace, TrainingStarted)[0].device == device


def test_resume_is_exact(bench):
    whole, halves = bench("whole", eval_steps=5), bench("halves", eval_steps=5)
    train(whole)

    class Dies(Line):
        def learn(self, rows, **how):
            if self.steps == 8:
                raise ConnectionError("the cable was pulled")
            return super().learn(rows, **how)

    with pytest.raises(ConnectionError):
        train(halves, Dies)
    found = newest(checkpoints_of(halves.config))
    assert found.step == 6
    _, outcome = train(halves, number=2, resume_from=found)
    assert outcome == "finished"
    assert exported(halves) == exported(whole) != 0


def test_documented_learner_trains(bench):
    (block,) = (item for item in blocks("python") if "LearnerTrainer(" in item.text)
    names = {"__name__": "snippet"}
    exec(block.text, names)
    done = bench(num_train_epochs=2, max_steps=-1)
    data = done.data.model_copy(update={"labels": ["a", "b", "c"]})
    done = dataclasses.replace(done, data=data)
    rank, outcome = train(done, names["NAIVE_BAYES"].learner)
    result = AttemptResult.load(rank.folder.result)
    assert (outcome, result.step, result.metric) == ("finished", 20, "accuracy")
    assert result.best_score > 0.5
    assert np.load(done.workspace.model / "counts.npy").sum() > 3 * 8192


def test_request_to_stop_leaves_a_checkpoint_of_that_step(bench):
    stopped = bench()

    class Asked(Line):
        def learn(self, rows, **how):
            if self.steps == 4:
                (stopped.workspace.attempts / "1" / "stop").write_text("pruned")
            return super().learn(rows, **how)

    rank, outcome = train(stopped, Asked)
    assert outcome == "pruned"
    assert newest(checkpoints_of(stopped.config)).step == rank.step == 5
    assert not stopped.workspace.model.exists()


def test_best_model_is_exported_and_training_stops_early(bench):
    early = bench(early_stopping_patience=2, eval_steps=2, max_steps=40)

    class Drifts(Line):
        def learn(self, rows, **how):
            learned = super().learn(rows, **how)
            if self.steps > 6:
                self.weight -= 1
            return learned

    rank, outcome = train(early, Drifts)
    assert (outcome, rank.step) == ("early_stopped", 10)
    assert AttemptResult.load(rank.folder.result).best_step == 6
    best = Checkpoint.at(early.workspace.checkpoints / "step-00000006")
    assert exported(early) == float(best.tensors("model")["weight"][0])


def test_divergence_is_reported_and_answered(bench):
    bad, seen = bench(eval_steps=12), []

    class Diverges(Line):
        def learn(self, rows, *, learning_rate_scale):
            seen.append((tuple(row["label"] for row in rows), learning_rate_scale))
            learned = super().learn(rows, learning_rate_scale=learning_rate_scale)
            lost = len(seen) == 5
            return dataclasses.replace(learned, loss=float("nan")) if lost else learned

    with pytest.raises(Diverged, match="step 5"):
        train(bad, Diverges)
    assert events_of(bad.workspace, TrainingDiverged)[0].step == 5
    found = newest(checkpoints_of(bad.config))
    assert found.step == 3
    train(bad, Diverges, 2, found, skipped_batches=(4,), learning_rate_scale=0.1)
    (batch_3, scale), (after, _) = seen[5:7]
    assert batch_3 == seen[3][0]
    assert scale == 0.1
    assert after != seen[4][0], "the batch at which the loss diverged is left out"


def test_failure_is_reported_with_its_step(bench):
    folder = bench().attempt()

    class Runs(Line):
        def learn(self, rows, **how):
            if self.steps == 2:
                raise MemoryError
            return super().learn(rows, **how)

    def make(place):
        rank = LearnerRank(place, "")
        rank.load = lambda: Runs
        return rank

    assert serve(str(folder), make) == 1
    (error,) = AttemptFolder(folder).errors()
    assert (error.kind, error.step) == ("MemoryError", 2)


def test_unsupported_array_is_named(bench):
    class Wordy(Line):
        def state(self):
            return {"words": np.array(["a", "b"])}

    with pytest.raises(BadInput, match=r"state\(\)\['words'\].*<U1"):
        train(bench(), Wordy)


def test_missing_metric_is_named(bench):
    class Silent(Line):
        def validate(self, rows):
            return {"rows": float(len(list(rows)))}

    with pytest.raises(BadInput, match=r"Silent.validate returned no 'loss'.*but rows"):
        train(bench(), Silent)


def test_several_ranks_are_rejected(bench):
    content = bench().config.model_dump(mode="json")
    content["compute"]["nproc_per_node"] = 2
    with pytest.raises(BadInput, match=r"compute.nproc_per_node = 2.*one process"):
        LearnerTrainer(Line)(from_mapping(content), None, on_validation=None, sinks=())


def test_running_out_of_memory_is_retried_unchanged():
    started = AttemptStarted(
        attempt=1, world_size=1, batch=BatchSettings(8), gradient_accumulation_steps=1, device="cpu"
    )
    history = History(attempts=[AttemptHistory(started)])
    failure = Failure(failure_class=FailureClass.HOST_OOM, message="MemoryError")
    assert decide(history, failure).action == "retry_changed"
    assert decide(history, failure, RecoveryConfig(), fallbacks=False).action == "retry"


def test_digest_covers_weights_of_unknown_formats(tmp_path):
    (tmp_path / "line.json").write_text("1.0")
    before = weights_digest(tmp_path)
    (tmp_path / "line.json").write_text("2.0")
    assert weights_digest(tmp_path) != before


def test_cut_is_continued_to_the_same_result(bench):
    whole, cut = bench("whole"), bench("cut")
    train(whole)
    _, outcome = train(cut, until=8)
    found = newest(checkpoints_of(cut.config))
    assert (outcome, found.step) == ("pruned", 8)
    assert not cut.workspace.model.exists()
    _, outcome = train(cut, number=2, resume_from=found, until=12)
    assert outcome == "finished"
    assert exported(cut) == exported(whole) != 0


def test_cut_where_nothing_is_validated_is_an_error(bench):
    with pytest.raises(BadInput, match="until = 6"):
        train(bench(), until=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("train.framework.training", {"transformers", "torch._dynamo", "accelerate"}),
        ("tabular.learners.pytorch", {"torch"}),
        ("series.scoring", {"torch"}),
    ],
)
def test_what_takes_longest_to_import_is_not_imported_for_another_framework(module, heavy):
    code = f"import sys, steadytrain.components.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & {*done.stdout.split()}
