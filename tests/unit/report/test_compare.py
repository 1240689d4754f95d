"""`steadytrain compare`: two runs side by side, and whether one model is better."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.metric import Scores, measure
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping, load
from steadytrain.components.shared.events.types import AttemptStarted
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.workspace import Workspace

from support.evaluating import language_table
from support.odd import call
from support.written_run import Writer


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The output folder of two runs whose models were scored on the same records, and a twin."""
    output = tmp_path_factory.mktemp("compare")
    for run, better_by, rate in (("weak", 0, 1e-4), ("strong", 3, 3e-4), ("twin", 0, 1e-4)):
        content = {"data": {"source": ["a"]}, "model": {"config": {"model_type": "llama"}}}
        content |= {"name": "tiny", "run": run, "output": str(output)}
        content |= {"compute": {"price_per_hour": 3600}, "training": {"learning_rate": rate}}
        written = Writer(from_mapping(content))
        written.preprocess()
        written.start_step("train")
        steps = 300 if run == "strong" else 200
        written.attempt(1, last=steps, max_steps=steps, task_metrics=True)
        written.trained(steps=steps)
        score(written, better_by)
    return output


def score(written, better_by):
    """Write per-example scores and their record, as the evaluate step does."""
    numbers = np.random.default_rng(better_by)
    hardness = np.random.default_rng(9).normal(50, 20, 200)
    losses = hardness + numbers.normal(0, 5, 200) - better_by
    table = language_table(losses, [20] * 200, [80] * 200)
    path = written.workspace.evaluation / "scores.parquet"
    path.parent.mkdir()
    pq.write_table(table, path)
    found = measure(Scores.of(table), Resampling(100, 0.95, 0))
    written.evaluated(examples=200, metrics=found)
    for record in ("evaluate", "train"):
        change(written.workspace.folder, record, weights_digest=f"w{better_by}")
    change(written.workspace.folder, "evaluate", scores=str(path))


@pytest.fixture
def runs(evaluated, tmp_path):
    """A copy, to damage. The records keep the paths of the original."""
    shutil.copytree(evaluated / "runs", tmp_path / "runs")
    return tmp_path


def compared(output, *names):
    done = call("compare", *names, "-o", str(output), "--json", folder=output)
    assert done.code == 0, done
    return json.loads(done.out)


def test_better_model_is_named_with_an_interval_that_excludes_0(evaluated):
    told = compared(evaluated, "weak", "strong")
    assert (told["better"], told["metric"], told["confidence"]) == ("strong", "bits_per_byte", 0.95)
    bits = told["test"]["bits_per_byte"]
    one, other = (
        EvaluationRecord.load(Workspace(evaluated, run).record("evaluate")).metrics["bits_per_byte"]
        for run in ("weak", "strong")
    )
    assert bits["values"] == pytest.approx([one.value, other.value])
    assert bits["difference"] == pytest.approx(other.value - one.value)
    low, high = bits["interval"]
    assert low < bits["difference"] < high < 0
    assert told["verdict"].startswith("strong is better: bits per byte ")
    # The order of the arguments decides about signs, not about who is better.
    turned = compared(evaluated, "strong", "weak")
    assert turned["better"] == "strong"
    assert turned["test"]["bits_per_byte"]["difference"] == pytest.approx(-bits["difference"])


def test_differences_metrics_time_tokens_and_cost_are_side_by_side(evaluated):
    told = compared(evaluated, "weak", "strong")
    assert told["differences"]["configuration"] == {
        "training.learning_rate": ["0.0001", "0.0003"],
    }
    assert told["differences"]["code"] == told["differences"]["data"] == {}
    assert told["tokens"] == [200 * 16_384, 300 * 16_384]
    assert told["training_seconds"][1] > told["training_seconds"][0] > 0
    assert told["usd"][1] > told["usd"][0] > 0
    validation = told["steps"]["validation accuracy"]
    assert validation["step"] == [100, 200, 300]
    assert validation["values"][0][2] is None
    assert told["steps"]["training loss"]["step"] == [*range(10, 201, 10)]


def test_other_code_environment_and_hardware_are_listed(evaluated, runs):
    config = load(runs / "runs" / "weak" / "config.yaml").model_copy(
        update={"run": "other", "output": str(runs)}
    )
    written = Writer(config)
    written.emit(
        "supervisor",
        AttemptStarted,
        attempt=1,
        world_size=4,
        batch=BatchSettings(2),
        gradient_accumulation_steps=1,
        code={"mlflow.source.git.commit": "abc", "steadytrain.git_diff_digest": "d1"},
    )
    told = compared(runs, "weak", "other")
    assert told["differences"]["code"]["mlflow.source.git.commit"] == ["(not set)", "abc"]
    assert told["differences"]["code"]["git_diff_digest"] == ["(not set)", "d1"]
    shape = told["differences"]["hardware"]["micro-batch x accumulation x world size"]
    assert shape == ["8 x 2 x 2", "2 x 1 x 4"]
    assert set(told["unrecorded"]) == {"data", "environment"}


def test_text_and_page_show_the_same(evaluated, tmp_path):
    page = tmp_path / "new" / "page.html"
    done = call(
        *("compare", "weak", "strong", "-o", str(evaluated), "--html", str(page)), folder=tmp_path
    )
    assert done.code == 0
    text = page.read_text()
    for words in ("strong is better: bits per byte", "training.learning_rate", "0.0003", "Cost"):
        assert words in done.out, words
        assert words in text, words
    assert "the same: data, code, environment" in done.out
    assert 'class="line c1"' in text
    assert str(page) in done.out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "records/evaluate.json").unlink(), "weak has no scores on the test"),
        (lambda run: change(run, "evaluate", scores="/nonexistent/x"), "cannot be read: No such"),
        (lambda run: change(run, "evaluate", scores="/dev/zero"), "Not a regular file"),
        (lambda run: change(run, "evaluate", scores="a\0b"), "ab does not hold scores"),
        (lambda run: change(run, "evaluate", scores=__file__), "does not hold scores"),
        (lambda run: change(run, "evaluate", weights_digest="old"), "of an earlier model"),
        (lambda run: change(run, "preprocess", split_digest="y"), "was trained on another split"),
        (lambda run: (run / "records/preprocess.json").unlink(), "weak has no record of its data"),
        (lambda run: change(run, "evaluate", splits=["x"]), "may have seen the test records"),
        (lambda run: (run / "records/evaluate.json").write_text("{"), "weak has no scores"),
    ],
)
def test_models_that_cannot_be_paired_are_not_compared(runs, damage, words):
    damage(runs / "runs" / "weak")
    told = compared(runs, "weak", "strong")
    assert (told["better"], told["test"], told["metric"]) == (None, {}, None)
    assert words in told["verdict"]
    assert told["differences"]["configuration"]


def change(run, record, **fields):
    path = run / "records" / f"{record}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_same_weights_are_no_difference(evaluated):
    assert "both runs have the same weights" in compared(evaluated, "weak", "twin")["verdict"]


def test_damaged_files_are_listed_and_the_rest_is_compared(runs):
    (runs / "runs" / "weak" / "records" / "train.json").write_text("[]")
    told = compared(runs, "weak", "strong")
    assert len(told["damaged"]) == 1
    assert "train.json" in told["damaged"][0]
    assert told["better"] == "strong"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("weak", "weak"), "'weak' is given twice"),
        (("weak", "none"), "run 'none': not in"),
        (("../weak", "strong"), "'../weak'"),
        (("weak", "broken"), "config.yaml cannot be used"),
    ],
)
def test_wrong_runs_are_errors_with_a_fix(runs, names, words):
    (runs / "runs" / "broken").mkdir()
    (runs / "runs" / "broken" / "config.yaml").write_text("training: [\n")
    done = call("compare", *names, "-o", str(runs), folder=runs)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "fix: " in done.err


def test_hostile_names_and_values_stay_text(runs):
    hostile = "<script>\x1b[31m{{ 7*7 }}"
    change(runs / "runs" / "weak", "preprocess", labels=[hostile], inputs_digest=hostile)
    page = runs / "page.html"
    done = call("compare", "weak", "strong", "-o", str(runs), "--html", str(page), folder=runs)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "<script>" not in page.read_text()
    assert "{{ 7*7 }}" in page.read_text()


def test_light_install_says_what_is_missing_and_compares_the_rest(evaluated, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.endswith(("evaluate.paired", "scores"))]:
        monkeypatch.delitem(sys.modules, name)
    told = compared(evaluated, "weak", "strong")
    assert "pyarrow is not installed (pip install 'steadytrain[train]')" in told["verdict"]
    assert told["differences"]["configuration"]


@pytest.mark.slow
def test_comparison_does_not_import_torch(evaluated):
    code = (
        "import sys; from steadytrain.pipelines.cli import app\n"
        f"app(['compare', 'weak', 'strong', '-o', {str(evaluated)!r}], standalone_mode=False)\n"
        "print([name for name in ('torch', 'mlflow', 'sklearn', 'optuna') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
