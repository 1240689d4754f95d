"""The summary of a profile says where the time of the recorded steps went, and what to change."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from steadytrain.components.observe.profile import Profile
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning

from support.benches import make_bench
from support.training import LLAMA, weights_digest

__all__ = ["make_bench"]
RECORDED = {"profile": {"steps": [3, 5]}}


@pytest.fixture
def slow_data(monkeypatch):
    prompt = SupervisedFineTuning.collate

    def late(*given):
        # Far more than a step takes, also on a busy machine.
        time.sleep(2)
        return prompt(*given)

    monkeypatch.setattr(SupervisedFineTuning, "collate", late)


@pytest.mark.slow
def test_profile_changes_no_weight(make_bench):
    plain, profiled = make_bench("plain"), make_bench("profiled", training=RECORDED)
    plain.train_here()
    profiled.train_here()
    assert weights_digest(plain.workspace) == weights_digest(profiled.workspace)


@pytest.mark.slow
def test_profile_of_a_run_with_slow_data_says_so_first(make_bench, slow_data):
    bench = make_bench(training=RECORDED)
    bench.train_here()
    found = Profile.of(bench.config)
    (rank,) = found.ranks
    assert (rank.first, rank.last, rank.device, rank.memory_peak) == (3, 5, "cpu", 0)
    assert [step.step for step in found.steps] == [3, 4, 5]
    assert 0 < rank.busy_seconds < rank.seconds
    shares = found.shares()
    assert shares["data"] > 0.25
    assert sum(shares.values()) == pytest.approx(1, abs=0.05)
    assert not any("torch_compile" in change.text for change in found._possible())
    changes = found.changes()
    assert len(changes) <= 3
    assert ("input" in changes[0].text, changes[0].gain) == (True, shares["data"])
    lines = found.lines()
    assert len(lines) <= 10
    assert "memory: no snapshot on a CPU" in lines
    trace = bench.workspace.folder / "profile" / "rank-0.trace.json.gz"
    with gzip.open(trace) as handle:
        names = {event["name"] for event in json.load(handle)["traceEvents"]}
    assert any("aten::" in name for name in names)


def test_run_without_a_profile_says_how_to_get_one(make_bench):
    with pytest.raises(BadInput, match=r"no profile") as error:
        Profile.of(make_bench().config)
    assert "training.profile.steps" in error.value.remedy


@pytest.mark.parametrize("steps", [[5, 3], [1, 200], [0, 3], [1]])
def test_steps_that_make_no_profile_are_refused(steps):
    content = {"name": "a", "data": {"source": ["a.txt"]}, "model": {"config": LLAMA}}
    with pytest.raises(ConfigError, match=r"training\.profile\.steps"):
        from_mapping({**content, "training": {"profile": {"steps": steps}}})
