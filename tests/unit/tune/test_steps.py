"""A study of a configuration with epochs counts their steps once, and keeps the number."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.tune import search
from steadytrain.components.tune.designs import as_ablation
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.search import with_known_steps, with_steps
from steadytrain.components.tune.study import Study, study_name

SPACE = {"training.learning_rate": {"low": 1e-4, "high": 1e-2}}
ROWS = [
    " ".join(hashlib.sha256(f"{row}".encode()).hexdigest()[i : i + 5] for i in range(0, 60, 5))
    for row in range(60)
]


@pytest.fixture
def config(tmp_path):
    source = tmp_path / "data.jsonl"
    source.write_text("".join(f"{json.dumps({'text': text})}\n" for text in ROWS))

    def make(**overrides):
        settings = {
            "output": str(tmp_path / "output"),
            "data.source": [str(source)],
            "data.format": "auto",
            "data.columns": {},
            "data.validation_share": 0.2,
            "data.test_share": 0.2,
            "data.sequence_length": 16,
            "model.vocab_size": 300,
            "training.max_steps": -1,
            "training.num_train_epochs": 1.5,
            "training.global_batch_size": 4,
            "training.eval_steps": 2,
            "tune.space": SPACE,
        }
        return load("causal-lm", settings | overrides)

    return make


def test_epochs_are_counted_on_the_prepared_data_and_kept(config):
    plain, log, lines = config(), MemoryLog(), []
    folder = study_folder(plain)
    assert with_known_steps(plain, folder) is None
    found = with_steps(plain, log.read(), folder, lines.append)
    record = json.loads(next((folder / "trials" / "data").glob("*.json")).read_text())
    assert found.training.max_steps == math.ceil(1.5 * record["sides"]["train"]["rows"] / 4)
    assert f"a trial has {found.training.max_steps:,} steps" in lines[-1]
    assert study_name(found) == study_name(plain)
    assert with_known_steps(plain, folder) == found
    study = Study(found, log)
    assert study.rungs.cuts[-1] == found.training.max_steps
    (folder / "trials").rename(folder / "gone")
    again = with_steps(plain, log.read(), folder, lines.append)
    assert Study(again, log).rungs.cuts == study.rungs.cuts
    assert len(lines) == 2


def test_data_that_a_command_prepared_before_it_failed_are_not_those_of_a_later_study(
    config, tmp_path, monkeypatch
):
    plain, lines = config(), []

    def refused(*_):
        raise RuntimeError(lines[-1])

    monkeypatch.setattr(search, "trials_for", refused)
    for rows in (ROWS, ROWS[:30]):
        (tmp_path / "data.jsonl").write_text(
            "".join(f"{json.dumps({'text': it})}\n" for it in rows)
        )
        with pytest.raises(RuntimeError, match="a trial has"):
            search.search(plain, MemoryLog(), None, lines.append)
    first, second = (int(line.split()[3]) for line in lines if line.startswith("a trial has"))
    assert second < first


def test_study_that_is_impossible_with_so_many_steps_is_refused(config):
    limited = config(**{"tune.budget.steps": 2})
    with pytest.raises(ConfigError, match=r"tune\.budget\.steps"):
        with_steps(limited, [], study_folder(limited), print)


def test_ablation_may_give_epochs(config):
    changes = {"decay": {"training.weight_decay": 0.3}}
    ablation = as_ablation(config(**{"tune.space": {}, "ablation.changes": changes}))
    log = MemoryLog()
    found = with_steps(ablation, log.read(), study_folder(ablation), print)
    assert Study(found, log).rungs.cuts == (found.training.max_steps,)


def test_steps_that_are_set_stay(config):
    limited = config(**{"training.max_steps": 20})
    assert with_steps(limited, [], study_folder(limited), print) is limited
