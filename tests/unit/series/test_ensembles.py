"""An ensemble learns all but the test side, and its interval is as wide as its own errors.

Its forecasts are the mean of its members'.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.automl.unit_scores import forecasts_of, out_of_fold
from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.series.boosting import BoostingLearner
from steadytrain.components.series.ensemble import SeriesEnsembleLearner
from steadytrain.components.series.errors import errors, read_values
from steadytrain.components.series.learner import StatisticalLearner
from steadytrain.components.series.model import load
from steadytrain.components.series.network_member import NetworkMember
from steadytrain.components.series.scoring import SeriesScorer
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.train.framework.ensemble import with_validation

from support.planning import plan_of
from support.series import FIRMS, by_mlforecast, firms, firms_for_nixtla, prepared

pytestmark = pytest.mark.slow
MEMBERS = (
    "[{weight: 3, framework: statsforecast, config: {model_type: auto_theta}}, "
    "{framework: statsforecast, config: {model_type: seasonal_naive}}, "
    "{framework: mlforecast, config: {model_type: lightgbm}, max_steps: 4, learning_rate: 0.2}, "
    "{weight: 2, framework: pytorch, config: {model_type: mlp, width: 8, blocks: 1, context: 6}, "
    "max_steps: 5, schedule_steps: 9, learning_rate: 0.01}]"
)


def fields(members=MEMBERS, steps=4):
    given = f"model.config={{model_type: ensemble, members: {members}}}"
    return [*FIRMS, "model.framework=ensemble", given, f"training.max_steps={steps}"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    config, data = prepared(tmp_path_factory.mktemp("ensemble"), firms(), *fields())
    check_task(config)
    return config, data


class Killed(SeriesEnsembleLearner):
    """Dies between the two times that a member learns, and has done half of the step."""

    def member(self, index):
        raise KeyboardInterrupt


def trained(config, data, folder, stop=None):
    """Train members, in a second learner from a step on; return the exported model."""
    learner = SeriesEnsembleLearner(config, data)
    for ordinal in range(len(learner.members)):
        if ordinal == stop:
            state = {name: value.copy() for name, value in learner.state().items()}
            learner.__class__ = Killed
            with pytest.raises(KeyboardInterrupt):
                learner.learn((), learning_rate_scale=1.0)
            assert len(learner.before.models) == ordinal + 1
            learner = SeriesEnsembleLearner(config, data)
            learner.restore(state)
        learner.learn((), learning_rate_scale=1.0)
    folder.mkdir()
    learner.export(folder)
    return load(folder)


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    return trained(*made, tmp_path_factory.mktemp("whole") / "model")


def histories(until):
    """Return the investments of each firm before the last `until` years."""
    tables = firms().sort_values(["firm", "year"]).groupby("firm")["invest"]
    return {firm: it.to_numpy()[: len(it) - until] for firm, it in tables}


def test_forecasts_are_the_weighted_mean_of_those_of_statsforecast(made, whole):
    from statsforecast.models import AutoTheta, SeasonalNaive

    config, data = made
    rows = whole.rows(firms().to_dict("records"))
    others = []
    for place, steps in ((2, 4), (3, 5)):
        member = SeriesEnsembleLearner(config, data).member(place)
        for _ in range(steps):
            member.learn((), learning_rate_scale=1.0)
        others.append(member.learned_model().rows(firms().to_dict("records")))
    for firm, values in histories(0).items():
        own, trees, network = (
            np.array([row["prediction"] for row in it if row["firm"] == firm])
            for it in (rows, *others)
        )
        theta, naive = (
            kind(season_length=1).forecast(values, 3)["mean"] for kind in (AutoTheta, SeasonalNaive)
        )
        assert own == pytest.approx((3 * theta + naive + trees + 2 * network) / 7, rel=1e-9)
        assert not np.allclose(network, naive, rtol=1e-3)


def learned(config, data):
    """Return what each member learns alone from the training side, without an ensemble."""
    result = []
    kinds = (StatisticalLearner, StatisticalLearner, BoostingLearner, NetworkMember)
    for kind, steps, own in zip(
        *(kinds, (1, 1, 4, 5), SeriesEnsembleLearner(config, data).configs), strict=True
    ):
        member = kind(own, data)
        for _ in range(steps):
            member.learn((), learning_rate_scale=1.0)
        result.append(member.learned_model())
    return result


def test_its_interval_is_as_wide_as_the_errors_of_members_without_the_validation_side(made, whole):
    _, data = made
    truth = histories(3)
    apart = [[], [], []]
    members = learned(*made)
    # The training side ends 6 years before the last one; later origins see more of the years.
    for origin in range(3):
        sides = [read_values(data, whole.calendar, side) for side in ("train", "validation")]
        values = [*sides[0], *sides[1]]
        last = 1948 + origin
        past = [one for one in values if one.ordinal <= last]
        later = [one for one in values if one.ordinal > last]
        points = [errors(member, past, later)["predicted"] for member in members]
        for one, point in zip(later, np.average(points, axis=0, weights=[3, 1, 1, 2]), strict=True):
            assert one.value == truth[one.series][one.ordinal - 1935]
            scale = np.abs(np.diff(truth[one.series][: last - 1934])).mean()
            apart[one.ordinal - last - 1].append(abs(point - one.value) / scale)
    widths = []
    for several in apart:
        rank = min(len(several), math.ceil((len(several) + 1) * 0.8))
        widths.append(max([*widths, sorted(several)[rank - 1]]))
    assert whole.widths == pytest.approx(widths, rel=1e-9)
    for row in whole.rows(firms().to_dict("records")):
        scale = np.abs(np.diff(histories(0)[row["firm"]])).mean()
        half = widths[int(row["year"]) - 1955] * scale
        assert row["quantile_0.9"] - row["prediction"] == pytest.approx(half, rel=1e-6)
        assert row["prediction"] - row["quantile_0.1"] == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize("stop", [0, 2, 3])
def test_interrupted_training_continues_to_identical_forecasts(made, whole, tmp_path, stop):
    again = trained(*made, tmp_path / "model", stop)
    records = firms().to_dict("records")
    assert again.rows(records) == whole.rows(records)
    assert again.widths == whole.widths
    assert again.packages == ("statsforecast", "lightgbm", "mlforecast", "safetensors")


def test_checkpoint_of_members_that_learned_the_training_side_only_is_refused(made):
    learner = SeriesEnsembleLearner(*made)
    learner.learn((), learning_rate_scale=1.0)
    old = {name: it for name, it in learner.state().items() if not name.startswith("before.")}
    with pytest.raises(BadInput, match="learned the training side only, by an older steadytrain"):
        SeriesEnsembleLearner(*made).restore(old)


def test_each_step_of_a_member_is_a_sign_of_life_both_times(made):
    learner, beats = SeriesEnsembleLearner(*made), []
    learner.alive = lambda: beats.append(len(learner.models))
    for _ in range(4):
        learner.learn((), learning_rate_scale=1.0)
    # Models of statsforecast learn once.
    assert [beats.count(member) for member in range(4)] == [1, 1, 2 * 4, 2 * 5]


ALONE = {
    "trees": "{framework: mlforecast, config: {model_type: lightgbm, min_data_in_leaf: 5}, "
    "max_steps: 4, learning_rate: 0.2}",
    "network": "{framework: pytorch, config: {model_type: mlp, width: 8, blocks: 1, context: 6}, "
    "max_steps: 5, schedule_steps: 9, learning_rate: 0.01}",
    "theta": "{framework: statsforecast, config: {model_type: auto_theta}}",
}


@pytest.fixture(params=[*ALONE])
def alone(request, tmp_path):
    """Return the kind of an only member, its data, its model, and it without the ensemble."""
    config, data = prepared(tmp_path, firms(), *fields(f"[{ALONE[request.param]}]", 1))
    kinds = {"trees": BoostingLearner, "network": NetworkMember, "theta": StatisticalLearner}
    own = SeriesEnsembleLearner(config, data).configs[0]

    def member(data):
        result = kinds[request.param](own, data)
        for _ in range({"trees": 4, "network": 5, "theta": 1}[request.param]):
            result.learn((), learning_rate_scale=1.0)
        return result

    model = trained(config, data, tmp_path / "model", stop=None)
    return request.param, config, data, model, member


def test_only_member_learns_the_validation_side_too(alone, tmp_path):
    kind, config, data, model, member = alone
    judged = judged_records(config, data)
    scored = SeriesScorer(config, data).score({"model": model}, judged)["predicted"].to_numpy()
    before, both = (member(it).learned_model() for it in (data, with_validation(data)))
    assert type(model) is type(both)
    if kind == "network":
        assert {*model.weights} == {*both.weights}
        for name, expected in both.weights.items():
            assert (model.weights[name] == expected).all()
            assert not np.array_equal(before.weights[name], expected)
    elif kind == "trees":
        assert model.trees == both.trees != before.trees
        # Its intervals come from forecasts of the validation side by what had not learned it.
        (tmp_path / "before").mkdir()
        member(data).export(tmp_path / "before")
        assert model.widths == load(tmp_path / "before").widths
        expected = by_mlforecast(
            *(firms_for_nixtla(), 1, None, 3),
            lags=[1, 2, 3],
            windows=[3],
            differences=[1],
            learning_rate=0.2,
        ).set_index(["unique_id", "ds"])["trees"]
        keys = zip(judged["series"].to_pylist(), map(int, judged["time"].to_pylist()), strict=True)
        assert scored == pytest.approx([expected[key] for key in keys], rel=1e-6)
    past = {firm: values[:-3] for firm, values in histories(0).items()}
    naive = [past[firm][-1] for firm in judged["series"].to_pylist()]
    assert not np.allclose(scored, naive)
    records = firms().to_dict("records")
    found = model.rows(records)
    assert [row["prediction"] for row in found] == [row["prediction"] for row in both.rows(records)]
    if kind != "trees":
        # A network has learned its interval, and Theta computes one.
        assert found == both.rows(records)


def test_an_only_member_that_is_killed_learns_the_same(alone, tmp_path):
    kind, config, data, model, _ = alone
    if kind == "theta":
        return
    again = trained(config, data, tmp_path / "again", stop=0)
    records = firms().to_dict("records")
    assert again.rows(records) == model.rows(records)


@pytest.mark.parametrize(
    ("members", "steps", "message"),
    [
        (
            "[{framework: pytorch, config: {model_type: mlp}, max_steps: 9, schedule_steps: 8}]",
            1,
            "members.0.schedule_steps = 8: it is for pytorch, and not below max_steps, which is 9",
        ),
        (
            "[{framework: mlforecast, config: {model_type: lightgbm}, schedule_steps: 8}]",
            1,
            "members.0.schedule_steps = 8: it is for pytorch",
        ),
        ("[{framework: lightgbm, config: {model_type: lightgbm}}]", 1, "does not train"),
        (MEMBERS, 2, "training.max_steps = 2: each step trains one of the 4 members"),
        ("[]", 1, "members has no member"),
    ],
)
def test_members_that_forecast_nothing_are_refused(tmp_path, members, steps, message):
    config, data = prepared(tmp_path, firms(), *fields(members, steps))
    with pytest.raises(BadInput, match=message):
        SeriesEnsembleLearner(config, data).learn((), learning_rate_scale=1.0)


def test_a_plan_counts_the_largest_member(made):
    config, _ = made
    found = plan_of(config)
    assert (found.framework, found.steps, found.step_seconds) == ("ensemble", 4, None)
    # The network reads 6 values and whether they are there: more than the trees' features.
    assert found.features == 12
    weights = (12 + 1) * 8 + 2 * (8 + 1) * 8 + (8 + 1) * 9
    assert found.memory == 4 * 4 * weights + 32 * 12 * 4 + 11 * 17 * 8
    trees = config.model.config["members"][2]
    alone = {"model_type": "ensemble", "members": [trees]}
    training = config.training.model_copy(update={"max_steps": 1})
    model = config.model.model_copy(update={"config": alone})
    found = plan_of(config.model_copy(update={"model": model, "training": training}))
    # Of 17 years, 16 have a difference to learn; each feature takes 8 bytes, and one when binned.
    assert found.memory == 11 * 16 * found.features * 9


def test_intervals_of_held_out_forecasts_come_from_the_other_folds():
    random, count = np.random.default_rng(0), 4 * 3 * 2
    truth, scale = random.normal(size=count), random.uniform(1, 2, count)
    tables = []
    for shift in (0.5, -1.0):
        predicted = truth + shift * random.uniform(0.5, 1, count)
        apart = np.abs(predicted - truth)
        tables.append(
            pa.table(
                {
                    "id": [str(n) for n in range(count)],
                    "group": [f"series {n // 6}" for n in range(count)],
                    "series": [f"series {n // 6}" for n in range(count)],
                    "fold": [n // 2 % 3 for n in range(count)],
                    "ordinal": [float(n % 6) for n in range(count)],
                    "target": truth,
                    "predicted": predicted,
                    "absolute_error": apart,
                    "scaled_error": apart / scale,
                    "low": predicted - 9,
                    "high": predicted + 9,
                }
            )
        )
    found = out_of_fold(tables)
    assert forecasts_of(tables, {1: 3}, found) == tables[1]
    table = forecasts_of(tables, {0: 2, 1: 1}, found)
    mixed = (2 * tables[0]["predicted"].to_numpy() + tables[1]["predicted"].to_numpy()) / 3
    assert table["predicted"].to_numpy() == pytest.approx(mixed)
    wrong = np.abs(mixed - truth) / scale
    for n in range(count):
        widest = 0.0
        for ahead in range(n % 2 + 1):
            others = [m for m in range(count) if m // 2 % 3 != n // 2 % 3 and m % 2 == ahead]
            # Of 8 errors, the eighth: 9 times 0.8 is above 7.
            widest = max(widest, sorted(wrong[others])[7])
        assert table["high"][n].as_py() == pytest.approx(mixed[n] + widest * scale[n])
        assert table["low"][n].as_py() == pytest.approx(mixed[n] - widest * scale[n])
