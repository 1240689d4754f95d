"""An ablation compares variants in pairs, over seeds, and survives its driver like any study."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
import yaml
from typer.testing import CliRunner

import steadytrain.components.tune.search as runner
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tune.ablation import effects_of, estimates, holm, render
from steadytrain.components.tune.designs import as_ablation, variants
from steadytrain.components.tune.driver import drive
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.study import Study, study_name
from steadytrain.pipelines.cli import app

from support.snippets import documented
from support.synthetic_trials import Quiet, SyntheticTrials, World

CHANGES = {
    "decay": {"training.weight_decay": 0.5},
    "rate": {"training.learning_rate": 1e-3},
    "noise": {"training.adam_beta2": 0.9},
}
BOTH = "ablation.designs=[leave_one_out, one_at_a_time]"


def score(config, _):
    """The change of the rate helps, that of the decay harms, and the third does nothing."""
    training = config.training
    luck = random.Random(f"{training.seed} {training.adam_beta2} {training.weight_decay}")
    better = 0.3 * (training.learning_rate == 1e-3)
    worse = 0.2 * (training.weight_decay == 0.5)
    return 2.0 + training.seed / 10 - better + worse + luck.gauss(0, 0.01)


def settings_of(*overrides, changes=CHANGES):
    return load(
        "causal-lm",
        [
            ("ablation.changes", changes),
            "training.max_steps=20",
            "training.eval_steps=10",
            *overrides,
        ],
    )


def ended(config, log=None, **world):
    study = Study(as_ablation(config), log or MemoryLog())
    world = World(objective=score, **world)
    drive(study, SyntheticTrials(world), Quiet(), lambda: None, poll_seconds=0)
    return study


def problems(*overrides, changes):
    with pytest.raises(ConfigError) as caught:
        settings_of(*overrides, changes=changes)
    return {item.field: f"{item.message}; {item.remedy}" for item in caught.value.problems}


def test_variants_that_occur_in_both_designs_train_once():
    ablation = settings_of(BOTH, changes={"a": CHANGES["decay"], "b": CHANGES["rate"]}).ablation
    # With two changes, all but one is one of them alone.
    assert sorted(variants(ablation)) == [(), ("a",), ("a", "b"), ("b",)]


def test_effects_have_the_right_sign_size_and_verdict_in_both_designs():
    study = ended(settings_of(BOTH, "ablation.seeds=6"))
    assert len(study.history.trials) == 6 * 8
    found = {(e.comparison.design, e.comparison.change): e for e in effects_of(study)}
    for design in ("leave_one_out", "one_at_a_time"):
        assert found[design, "rate"].better is True
        assert found[design, "rate"].estimate.mean == pytest.approx(-0.3, abs=0.03)
        assert found[design, "decay"].better is False
        assert found[design, "noise"].better is None
        # Pairing takes out what the seeds have in common, which is far larger than the noise.
        assert found[design, "decay"].estimate.high < 0.3


def test_a_metric_to_maximize_turns_the_verdict():
    study = ended(settings_of("tune.objective.direction=maximize"))
    verdicts = {effect.comparison.change: effect.better for effect in effects_of(study)}
    assert verdicts["rate"] is False
    assert verdicts["decay"] is True


def test_more_seeds_continue_an_ablation():
    log = MemoryLog()
    first = ended(settings_of("ablation.seeds=2"), log)
    more = ended(settings_of("ablation.seeds=4"), log)
    assert (len(first.history.trials), len(more.history.trials)) == (8, 16)
    assert [trial.params["training.seed"] for trial in more.history.trials[::4]] == [42, 43, 44, 45]
    with pytest.raises(BadInput, match=r"other settings: ablation\.changes"):
        ended(settings_of(changes={"decay": CHANGES["decay"]}), log)


def test_order_of_the_changes_in_the_file_does_not_matter():
    turned = dict(reversed(CHANGES.items()))
    one, other = as_ablation(settings_of()), as_ablation(settings_of(changes=turned))
    assert study_name(one) == study_name(other)
    assert variants(one.ablation) == variants(other.ablation)


def test_seeds_of_failed_trials_are_left_out_of_their_pairs():
    # Trial 0 is all changes on the first seed: it is in each of the pairs.
    study = ended(settings_of("ablation.seeds=3"), failing={0: "oom"})
    assert [list(effect.pairs) for effect in effects_of(study)] == [[43, 44]] * 3
    study = ended(settings_of("ablation.seeds=2"), failing={0: "oom"})
    assert all(effect.estimate.p is None for effect in effects_of(study))
    assert all(effect.better is None for effect in effects_of(study))
    assert "not decided" in render(study)


def test_holm_adjusts_as_in_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_one_comparison_is_the_paired_t_test():
    from scipy import stats

    differences = [0.3, 0.1, -0.2, 0.4, 0.25]
    (found,) = estimates([differences], 0.95)
    peer = stats.ttest_1samp(differences, 0)
    interval = peer.confidence_interval(0.95)
    assert found.p == pytest.approx(peer.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_intervals_hold_together_as_often_as_they_claim():
    """Three comparisons share a variant, as in an ablation; single intervals would fail."""
    chance, rounds, held = random.Random(1), 400, 0
    for _ in range(rounds):
        shared = [chance.gauss(0, 1) for _ in range(5)]
        found = estimates([[x - chance.gauss(0, 1) for x in shared] for _ in range(3)], 0.9)
        held += all(item.low <= 0 <= item.high for item in found)
    assert held / rounds > 0.9 - 3 * math.sqrt(0.09 / rounds)


def test_equal_scores_are_no_effect():
    (found,) = estimates([[0.0, 0.0, 0.0]], 0.95)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert estimates([[]], 0.95) == [None]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"a": {"training.lerning_rate": 1}}, "a.training.lerning_rate", "did you mean"),
        ({"a": {"training.seed": 1}}, "a.training.seed", "lucky seed"),
        ({"a": {"data.test_share": 0.2}}, "a.data.test_share", "could not be compared"),
        ({"a": {"training.global_batch_size": 0}}, "a", "rejects these values"),
        ({"a": {"training.weight_decay": 0.1}}, "a", "it has no effect"),
        ({"a": {}}, "", "a changes no field"),
        ({" ": {"training.weight_decay": 0.2}}, "", "cannot be shown as a name"),
        ({"a\x1b[2J": {"training.weight_decay": 0.2}}, "", "cannot be shown as a name"),
        (
            {"a": {"training.weight_decay": 0.2}, "b": {"training.weight_decay": 0.3}},
            "b.training.weight_decay",
            "one_at_a_time",
        ),
        (
            {"a": {"training.bf16": True}, "b": {"training.fp16": True}},
            "",
            "rejects these values",
        ),
    ],
)
def test_wrong_change_is_found_before_anything_starts(changes, field, says):
    where = f"ablation.changes.{field}".removesuffix(".")
    assert says in problems("training.weight_decay=0.1", changes=changes)[where]


def test_changes_of_one_field_can_be_tried_one_at_a_time():
    changes = {"a": {"training.weight_decay": 0.2}, "b": {"training.weight_decay": 0.3}}
    settings_of("ablation.designs=[one_at_a_time]", changes=changes)


def test_ablation_is_not_part_of_the_runs_identity():
    assert settings_of().run_id == settings_of(changes={}).run_id


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(
        settings_of("ablation.seeds=3", "tracking.sinks=[]").to_yaml()
    )
    monkeypatch.chdir(tmp_path)
    world = World(objective=score)
    monkeypatch.setattr(runner, "local_trials", lambda study, **_: SyntheticTrials(world))
    return tmp_path


def steadytrain(*arguments):
    done = CliRunner().invoke(app, ["ablate", *arguments, "--output", "out"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


@pytest.mark.slow
def test_command_prints_a_table_and_writes_json_and_a_page(folder):
    text = steadytrain("tiny.yaml")
    assert "trial 0: all changes, seed 42" in text
    assert re.search(r"^rate +-0\.3\d* +-0\.\d+ to -0\.\d+ +<?0\.\d+ +3 +better$", text, re.M)
    told = json.loads(steadytrain("tiny.yaml", "--json"))
    place = folder / "out" / "studies" / told["study"]
    assert set(told) == documented("ablate")
    written = json.loads((place / "effects.json").read_text())
    assert told | written == told
    page = (place / "report.html").read_text()
    assert page.count("interval best") == 1
    assert "Leave one out" in page


def test_dry_run_shows_the_variants_and_starts_nothing(folder):
    text = steadytrain("tiny.yaml", "--dry-run")
    assert "4 variants on 3 seeds" in text
    told = json.loads(steadytrain("tiny.yaml", "--dry-run", "--json"))
    assert set(told) == documented("ablate --dry-run")
    assert told["trials"] == 12
    assert not (folder / "out").exists()


def test_ablation_without_changes_is_an_error_with_an_example(folder):
    content = yaml.safe_load((folder / "tiny.yaml").read_text())
    (folder / "none.yaml").write_text(yaml.safe_dump({**content, "ablation": {}}))
    with pytest.raises(BadInput, match=r"(?s)ablation\.changes.*no_decay"):
        steadytrain("none.yaml")
