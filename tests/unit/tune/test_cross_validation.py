"""A cross-validation: every configuration on every fold, intervals, comparisons, predictions."""

from __future__ import annotations

import json
import math
import random
import re
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import steadytrain.components.tune.search as runner
from steadytrain.components.preprocess import folds as folds_module
from steadytrain.components.report.facts import gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError, SteadytrainError
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.ablation import estimates
from steadytrain.components.tune.cross_validation import fold_sizes
from steadytrain.components.tune.designs import as_cross_validation
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.log import MemoryLog
from steadytrain.components.tune.step import run_cross_validation
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.trials.base import TrialState
from steadytrain.components.tune.trials.folder import LABELS, TrialFolder
from steadytrain.pipelines.cli import app

from support.data import sentence, write_jsonl
from support.snippets import documented
from support.synthetic_trials import SyntheticTrials, World

COMPARE = {
    "better": {"training.learning_rate": 1e-3},
    "same": {"training.adam_beta2": 0.9},
}
FOLDS = 4
RECORDS = 50


def settings_of(*overrides, compare=COMPARE):
    return load(
        "causal-lm",
        [
            ("cross_validation.compare", compare),
            f"cross_validation.folds={FOLDS}",
            "data.source=[package:asyncio]",  # enough to divide
            "training.max_steps=20",
            "training.eval_steps=10",
            "tracking.sinks=[]",
            *overrides,
        ],
    )


def scored(config):
    """Return scores as those of a classifier: the higher rate is right more often."""
    fold, training = config.cross_validation.fold, config.training
    luck = random.Random(f"{fold} {training.adam_beta2}")
    right = 0.6 + 0.03 * fold + 0.2 * (training.learning_rate == 1e-3)
    label = [luck.randint(0, 1) for _ in range(RECORDS)]
    wrong = [index >= right * RECORDS for index in range(RECORDS)]
    prediction = [1 - item if off else item for item, off in zip(label, wrong, strict=True)]
    table = pa.table(
        {
            "id": [f"{fold}-{index:03}" for index in range(RECORDS)],
            "group": pa.nulls(RECORDS, pa.string()),
            "slice": pa.nulls(RECORDS, pa.string()),
            "loss": [2.0 if off else 0.1 for off in wrong],
            "targets": [1] * RECORDS,
            "bytes": [0] * RECORDS,
            "label": label,
            "prediction": prediction,
            "probabilities": [[1.0 - item, float(item)] for item in prediction],
        }
    )
    return table.replace_schema_metadata({LABELS: b'["cat", "dog"]'})


class ScoredTrials(SyntheticTrials):
    """Trials that also score the fold that they hold out."""

    def __init__(self, study, world):
        super().__init__(world)
        self.study = study

    def train(self, number, config, until):
        super().train(number, config, until)
        place = TrialFolder(self.study, number).scores
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(scored(config), place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration, where trials are synthetic."""
    place, world = tmp_path_factory.mktemp("cross-validation"), World()
    (place / "tiny.yaml").write_text(settings_of().to_yaml())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(runner, "local_trials", lambda study, **_: ScoredTrials(study, world))
        yield place, world


def steadytrain(*arguments, output="out"):
    done = CliRunner().invoke(app, ["cross-validate", "tiny.yaml", *arguments, "--output", output])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


@pytest.fixture(scope="module")
def text(folder):
    """What the command says."""
    return steadytrain()


@pytest.fixture(scope="module")
def told(text):
    """What the same command says about a cross-validation that is complete."""
    assert text
    return json.loads(steadytrain("--json"))


class UnpreparedTrials(SyntheticTrials):
    """Trials whose data cannot be prepared."""

    def state(self, number):
        return TrialState("failed", failure="data", error=f"no column for {number}")


def test_data_that_cannot_be_prepared_end_it_at_the_first_fold(tmp_path, monkeypatch):
    world = World()
    (tmp_path / "tiny.yaml").write_text(settings_of().to_yaml())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "local_trials", lambda *_, **__: UnpreparedTrials(world))
    with pytest.raises(DataError, match="no column for 0") as refused:
        steadytrain()
    assert "another name" in refused.value.remedy
    assert len(world.configs) <= 2


@pytest.mark.slow
def test_command_compares_configurations_on_the_same_folds(folder, told):
    place, _ = folder
    assert set(told) == documented("cross-validate")
    found = {(item["configuration"], item["metric"]): item for item in told["comparisons"]}
    assert found["better", "accuracy"]["mean"] == pytest.approx(0.2, abs=0.03)
    assert found["better", "accuracy"]["better"] is True
    # A lower loss is better.
    assert found["better", "loss"]["mean"] < 0
    assert found["better", "loss"]["better"] is True
    assert found["same", "accuracy"]["better"] is None
    assert found["same", "accuracy"]["pairs"].keys() == {"0", "1", "2", "3"}
    (plain, *_) = told["configurations"]
    values = list(plain["values"]["accuracy"].values())
    assert values == pytest.approx([0.6, 0.64, 0.66, 0.7])
    assert plain["means"]["accuracy"]["mean"] == pytest.approx(statistics.fmean(values))
    output = place / "out" / "studies" / told["study"]
    assert json.loads((output / "cross-validation.json").read_text()).items() <= told.items()
    page = (output / "report.html").read_text()
    assert "Differences in accuracy" in page
    assert page.count("interval best") >= 1


def test_every_record_has_one_out_of_fold_prediction_of_each_configuration(folder, told):
    place, _ = folder
    table = pq.read_table(place / "out" / "studies" / told["study"] / "out-of-fold.parquet")
    keys = [*zip(table["configuration"].to_pylist(), table["id"].to_pylist(), strict=True)]
    assert keys == sorted(set(keys))
    assert len(keys) == 3 * FOLDS * RECORDS
    assert all(row["id"].startswith(f"{row['fold']}-") for row in table.to_pylist())
    assert set(table["prediction"].to_pylist()) == {"cat", "dog"}


def test_text_has_a_table_of_means_and_one_of_differences(text):
    assert "trial 0: as it is, fold 0 held out" in text
    assert "trial 5: same, fold 1 held out" in text
    assert re.search(r"^accuracy +as it is +0\.65\d* +0\.\d+ to 0\.\d+ +4$", text, re.M)
    assert re.search(
        r"^accuracy +better +\+0\.\d+ +\+0\.\d+ to \+0\.\d+ +<?0\.\d+ +4 +better$", text, re.M
    )


def test_fold_that_failed_is_left_out_of_its_pairs(folder, monkeypatch):
    world = World(failing={0: "oom"})
    monkeypatch.setattr(runner, "local_trials", lambda study, **_: ScoredTrials(study, world))
    told = json.loads(steadytrain("--json", output="failing"))
    assert told["trials_failed"] == 1
    pairs = [item["pairs"].keys() for item in told["comparisons"]]
    assert all(found == {"1", "2", "3"} for found in pairs)


@pytest.mark.slow
def test_dry_run_starts_nothing(folder):
    place, _ = folder
    text = steadytrain("--dry-run", output="never")
    assert "12: 3 configurations, 1 at a time" in text
    told = json.loads(steadytrain("--dry-run", "--json", output="never"))
    assert set(told) == documented("cross-validate --dry-run")
    assert (told["trials"], told["steps"]) == (12, 240)
    assert not (place / "never").exists()


def labeled(path, *, groups=40, labels=2, count=200):
    """Write texts with a label and a writer; return the options of a command that reads them."""
    rows = [
        {"text": sentence(n), "label": f"l{n % labels}", "writer": f"w{n % groups}"}
        for n in range(count)
    ]
    source = write_jsonl(path / "rows.jsonl", rows)
    settings = {
        "data.source": [str(source)],
        "data.format": "auto",
        "data.exclude": [],
        "data.columns": {"group": "writer"},
        "output": str(path / "never"),
        "tracking.sinks": [],
    }
    return [
        part
        for name, value in settings.items()
        for part in ("--set", f"{name}={json.dumps(value)}")
    ]


def dry_run(*arguments):
    done = CliRunner().invoke(app, ["cross-validate", "cross-validation", *arguments, "--dry-run"])
    return done.stdout, done.exception


@pytest.mark.slow
def test_dry_run_divides_the_data(tmp_path):
    text, error = dry_run(*labeled(tmp_path))
    assert error is None
    assert "folds       5, stratified by label, grouped by writer" in text
    assert re.search(
        r"^records     \d+ to \d+ in a fold$|^records     \d+ in each fold$", text, re.M
    )
    told = json.loads(dry_run(*labeled(tmp_path), "--json")[0])
    assert len(told["records"]) == 5
    assert 100 < sum(told["records"]) < 200
    assert told["warnings"] == []
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"groups": 6}, r"has \d groups, and cross_validation\.folds is 5"),
        ({"labels": 40, "groups": 200}, r"each label has fewer than cross_validation\.folds = 5"),
    ],
)
def test_dry_run_rejects_data_that_cannot_be_divided(tmp_path, data, message):
    _, error = dry_run(*labeled(tmp_path, **data))
    assert isinstance(error, DataError)
    assert re.search(message, error.message)
    assert "cross_validation.folds" in error.remedy
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("through", ["command", "step"])
def test_data_that_cannot_be_divided_stop_a_new_study_before_its_first_run(
    tmp_path, monkeypatch, through
):
    world = World()
    monkeypatch.setattr(runner, "local_trials", lambda study, **_: ScoredTrials(study, world))
    options = [*labeled(tmp_path, groups=18), "--run", "folds"]

    def cross_validate(folds):
        sets = [*options, "--set", f"cross_validation.folds={folds}"]
        if through == "command":
            done = CliRunner().invoke(app, ["cross-validate", "cross-validation", *sets])
            if done.exception:
                raise done.exception
        else:
            values = [value for value in sets if "=" in value]
            run_cross_validation(load("cross-validation", [*values, "run=folds"]))

    for _ in range(2):
        with pytest.raises(DataError, match=r"\d+ groups, and cross_validation\.folds is 30"):
            cross_validate(30)
    assert world.configs == {}
    # The name is still free for the corrected command.
    cross_validate(3)
    assert len(world.configs) == 6


def test_dry_run_warns_of_labels_that_are_in_few_folds(tmp_path):
    text, _ = dry_run(*labeled(tmp_path, labels=30, groups=200))
    assert re.search(
        r"^warning     there are fewer than 5 training records with the label l\d", text, re.M
    )


def test_dry_run_says_why_it_did_not_read_the_data(tmp_path, monkeypatch):
    options = labeled(tmp_path)
    monkeypatch.setattr(folds_module, "_MOST", 100)
    text, error = dry_run(*options)
    assert error is None
    assert "records     not checked: the data have" in text
    (tmp_path / "rows.jsonl").unlink()
    text, error = dry_run(*options, "--json")
    assert error is None
    told = json.loads(text)
    assert told["records"] is None


def test_dry_run_rejects_data_that_have_no_folds():
    with pytest.raises(ConfigError, match="would be in several folds"):
        fold_sizes(load("multi-task", ["training.max_steps=20", "ablation.changes={}"]))


def test_interval_is_that_of_nadeau_and_bengio():
    from scipy import stats

    values = [0.71, 0.68, 0.75, 0.66, 0.70]
    (found,) = estimates([values], 0.95, overlap=1 / 4)
    error = math.sqrt(statistics.variance(values) * (1 / 5 + 1 / 4))
    half = stats.t.ppf(0.975, 4) * error
    assert (found.low, found.high) == pytest.approx(
        (statistics.fmean(values) - half, statistics.fmean(values) + half)
    )
    assert found.p == pytest.approx(2 * stats.t.sf(statistics.fmean(values) / error, 4))


def test_interval_on_overlapping_training_sets_holds_more_often_than_the_plain_one():
    """Scores of resampled training sets share records; the plain t interval is far too short."""
    chance, rounds, share = random.Random(3), 300, 5
    held = {0.0: 0, 1 / (share - 1): 0}
    for _ in range(rounds):
        common = chance.gauss(0, 1)
        values = [common + chance.gauss(0, 1.4) for _ in range(share)]
        for overlap in held:
            (found,) = estimates([values], 0.9, overlap=overlap)
            held[overlap] += found.low <= 0 <= found.high
    assert held[0.0] / rounds < 0.8
    assert held[1 / (share - 1)] / rounds > held[0.0] / rounds + 0.08


def test_order_in_the_file_does_not_matter_and_other_folds_are_another_study():
    turned = settings_of(compare=dict(reversed(COMPARE.items())))
    assert study_name(as_cross_validation(turned)) == study_name(as_cross_validation(settings_of()))
    log = MemoryLog()
    Study(as_cross_validation(settings_of()), log)
    Study(as_cross_validation(settings_of("cross_validation.confidence=0.9")), log)
    with pytest.raises(BadInput, match=r"cross_validation\.folds \d -> 6"):
        Study(as_cross_validation(settings_of("cross_validation.folds=6")), log)


@pytest.mark.parametrize(
    ("compare", "field", "says"),
    [
        ({"a": {"training.lerning_rate": 1}}, "a.training.lerning_rate", "did you mean"),
        ({"a": {"cross_validation.folds": 3}}, "a.cross_validation.folds", "not be compared"),
        ({"a": {"data.source": ["x"]}}, "a.data.source", "could not be compared"),
        ({"a": {"training.weight_decay": 0.1}}, "a", "it has no effect"),
        ({" ": {"training.weight_decay": 0.2}}, "", "cannot be shown as a name"),
    ],
)
def test_wrong_configuration_is_found_before_anything_starts(compare, field, says):
    with pytest.raises(ConfigError) as caught:
        settings_of("training.weight_decay=0.1", compare=compare)
    problems = {item.field: f"{item.message}; {item.remedy}" for item in caught.value.problems}
    assert says in problems[f"cross_validation.compare.{field}".removesuffix(".")]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cross_validation.fold=1", r"fold = 1.*holds out every fold in turn"),
        ("cross_validation.compare={as it is: {training.weight_decay: 0.3}}", "another name"),
    ],
)
def test_settings_that_cannot_be_cross_validated_are_an_error(folder, override, says):
    with pytest.raises((BadInput, ConfigError), match=rf"(?s){says}"):
        steadytrain("--set", override)


@pytest.fixture
def step(tmp_path, monkeypatch):
    """The step of the pipeline, with synthetic trials; returns its configuration."""

    def run(*overrides, world=None):
        trials = world or World()
        monkeypatch.setattr(runner, "local_trials", lambda study, **_: ScoredTrials(study, trials))
        config = settings_of(f"output={tmp_path}", "run=folds", *overrides)
        run_cross_validation(config)
        return config

    return run


def test_step_finds_what_the_command_finds(step, told, capsys):
    folder = study_folder(step())
    found = json.loads((folder / "cross-validation.json").read_text())
    assert found["configurations"] == told["configurations"]
    assert found["comparisons"] == told["comparisons"]
    assert pq.read_table(folder / "out-of-fold.parquet").num_rows == 3 * FOLDS * RECORDS
    assert "trial 5: same, fold 1 held out" in capsys.readouterr().out


def test_run_of_the_step_is_finished_without_a_registered_model(step):
    told = outcome(gather(Workspace.of(step())))
    assert told.state == "finished"
    assert told.sentence.endswith("is cross-validated: 12 of 12 runs are scored, on 4 folds.")


def test_step_without_a_scored_fold_fails_with_a_fix(step):
    with pytest.raises(SteadytrainError, match="no run finished") as early:
        step(
            "tune.max_failed_share=1",
            world=World(failing=dict.fromkeys(range(12), "user_bug")),
        )
    assert "what the failed runs name" in early.value.remedy


@pytest.mark.parametrize(
    ("override", "error", "named"),
    [
        (
            ("tune.space", {"training.learning_rate": {"low": 1e-4, "high": 1e-2}}),
            BadInput,
            "tune.space",
        ),
        (
            ("ablation.changes", {"other": {"training.learning_rate": 1e-4}}),
            BadInput,
            "ablation.changes",
        ),
    ],
)
def test_step_rejects_what_is_no_cross_validation(step, override, error, named):
    with pytest.raises(error, match=named.replace(".", r"\.")):
        step(override)
    field, value = override if isinstance(override, tuple) else override.split("=")
    arguments = ["cross-validate", "causal-lm", "--set", f"{field}={json.dumps(value)}"]
    done = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert isinstance(done.exception, error)
