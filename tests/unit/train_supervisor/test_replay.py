"""A caller that judges validations also gets those of a model that is reused."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, Pruned
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.shared.stage import ReuseStore
from steadytrain.components.train import step
from steadytrain.pipelines import run

from support.training import write_data
from support.written_run import Writer

TRAINED = {
    "outcome": "finished", "model": "", "weights_digest": "", "metric": "loss", "best_score": 1.0,
    "best_step": 8, "steps": 8, "attempts": 2, "parameters": 1, "seconds": 1.0,
}  # fmt: skip


@pytest.fixture
def twin(tmp_path):
    """The configuration and the data of a run whose model another run has trained."""
    content = {"data": {"source": ["a"]}, "model": {"config": {"model_type": "llama"}}}
    content |= {"name": "tiny", "output": str(tmp_path / "output")}
    first = Writer(from_mapping({**content, "run": "first"}))
    # The second attempt repeats step 4.
    for attempt, at, loss in ((1, 4, 9.0), (2, 4, 3.0), (2, 8, 1.0)):
        scores = {"metrics": {"loss": loss}, "epoch": 0.0, "best": True}
        first.emit("rank-0", Validated, attempt=attempt, step=at, **scores)
    config = from_mapping({**content, "run": "second"})
    data = write_data(tmp_path / "data", [], [], tokenizer=False)
    store = ReuseStore(first.workspace, "train", TrainRecord)
    store.remember(step._key(config, data), TrainRecord(**TRAINED), [])
    return config, data


def test_recorded_validations_are_passed_on_once_per_step(twin):
    seen = []

    def judge(event):
        seen.append((event.step, event.metrics["loss"]))
        return True

    record = step.run_stage(*twin, on_validation=judge)

    assert seen == [(4, 3.0), (8, 1.0)]
    assert record.outcome == "finished"


def test_recorded_validation_can_prune(twin):
    with pytest.raises(Pruned, match="pruned at step 4"):
        step.run_stage(*twin, on_validation=lambda event: event.step > 4)
    assert step.run_stage(*twin).steps == 8


@pytest.mark.parametrize("start", [run, step.run, step.run_stage])
def test_anything_but_a_function_is_rejected_before_anything_starts(tmp_path, start):
    content = {"data": {"source": ["a"]}, "model": {"config": {"model_type": "llama"}}}
    config = from_mapping({"name": "tiny", "output": str(tmp_path / "output"), **content})
    with pytest.raises(BadInput, match="on_validation = 5 is not a function"):
        start(config, on_validation=5)
    assert not (tmp_path / "output").exists()
