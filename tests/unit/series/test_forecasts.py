"""Forecasts and their scores are those of statsforecast and utilsforecast."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.comparison import Candidate
from steadytrain.components.evaluate.metric import Scores, measure
from steadytrain.components.series.learner import StatisticalLearner
from steadytrain.components.series.model import history, load, naive_scale
from steadytrain.components.series.scoring import SeriesScorer
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.tasks.base import OpenTask

from support.series import FIRMS, MONTHLY, firms, firms_for_nixtla, monthly, prepared

NAIVE = "model.config={model_type: seasonal_naive}"
pytestmark = pytest.mark.slow


def exported(config, data, folder):
    learner = StatisticalLearner(config, data)
    folder.mkdir()
    learner.export(folder)
    return learner, load(folder)


def test_records(data):
    with pa.memory_map(str(data.path(data.test_records))) as source:
        return pa.ipc.open_file(source).read_all()


test_records.__test__ = False


def reference(table, model, horizon, season):
    """Return statsforecast's forecasts of the last times of each series."""
    from statsforecast import StatsForecast

    past = table.groupby("unique_id").head(-horizon)
    made = StatsForecast(models=[model], freq=1).forecast(df=past, h=horizon, level=[80])
    return past, table.groupby("unique_id").tail(horizon).merge(made, on=["unique_id", "ds"])


def test_scores_are_those_of_utilsforecast_by_series(tmp_path):
    from statsforecast.models import AutoETS
    from utilsforecast.losses import mae, mase, quantile_loss, rmse, smape

    config, data = prepared(tmp_path, firms(), *FIRMS, "model.config={model_type: auto_ets}")
    _, model = exported(config, data, tmp_path / "model")
    records = test_records(data)
    scorer = SeriesScorer(config, data)
    scores = Scores.of(scorer.score({"model": model}, records))
    assert len(set(scores.units)) == 11
    found = measure(scores, Resampling(samples=200, confidence=0.95, seed=0))
    past, made = reference(firms_for_nixtla(), AutoETS(season_length=1), 3, 1)
    made = made.assign(lo=made["AutoETS-lo-80"], hi=made["AutoETS-hi-80"])
    name = ["AutoETS"]
    expected = {
        "mae": mae(made, name)["AutoETS"].mean(),
        "mase": mase(made, name, seasonality=1, train_df=past)["AutoETS"].mean(),
        "smape": 2 * smape(made, name)["AutoETS"].mean(),
        "mse": (rmse(made, name)["AutoETS"] ** 2).mean(),
        "pinball": np.mean(
            [
                quantile_loss(made, {"AutoETS": column}, q=level)["AutoETS"].mean()
                for level, column in ((0.1, "lo"), (0.5, "AutoETS"), (0.9, "hi"))
            ]
        ),
    }
    for metric, value in expected.items():
        assert found[metric].value == pytest.approx(value, rel=1e-9), metric
        assert found[metric].low < value < found[metric].high
    assert found["rmse"].value == pytest.approx(expected["mse"] ** 0.5)
    assert found["loss"].value == found["mase"].value
    baseline = Scores.of(scorer.score_baseline(records))
    last = past.groupby("unique_id")["y"].last()
    naive = np.abs(made["y"] - made["unique_id"].map(last)).mean()
    assert measure(baseline, Resampling(samples=2, confidence=0.9, seed=0))[
        "mae"
    ].value == pytest.approx(naive)


@pytest.mark.parametrize(
    ("table", "fields", "counted", "more"),
    [
        (firms, FIRMS, "11 series, with 33 test values for a horizon of 3,", "more series"),
        (
            monthly,
            MONTHLY,
            "12 test values of a single series, for a horizon of 12,",
            "a longer data.series.horizon",
        ),
    ],
)
def test_the_gate_says_how_many_series_and_values_it_judged(tmp_path, table, fields, counted, more):
    config, data = prepared(tmp_path, table(), *fields, NAIVE)
    _, model = exported(config, data, tmp_path / "model")
    records = test_records(data)
    scores = Scores.of(SeriesScorer(config, data).score({"model": model}, records))
    evaluation = EvaluationRecord(
        task="forecasting",
        weights_digest="",
        examples=records.num_rows,
        metrics=measure(scores, Resampling(samples=50, confidence=0.95, seed=0)),
        scores="",
    )
    judged = Candidate(config, data, OpenTask(config, data), "", evaluation, records, scores)
    decision = judged.against(None, lambda _: None, earlier=0)
    assert decision.undecided
    assert decision.reason.endswith(
        f"{counted} are too few to tell (30 needed): give more test data ({more})"
    )
    assert decision.reason.startswith("undecided: mase ")


@pytest.mark.parametrize("gaps", [0, 1])
def test_a_forecast_never_sees_the_future(tmp_path, gaps):
    table = monthly()
    table = table.drop(index=[131, 132][:gaps])
    config, data = prepared(tmp_path, table, *MONTHLY, NAIVE)
    learner, model = exported(config, data, tmp_path / "model")
    found = SeriesScorer(config, data).score({"model": model}, test_records(data))
    values = monthly()["co2"].to_numpy()
    if gaps:
        # Index 131 is the last time before the test side; its value of a year before is known.
        values[131] = np.nan
    got = dict(zip(found["target"].to_pylist(), found["predicted"].to_pylist(), strict=True))
    for ordinal in range(132, 144):
        assert got[values[ordinal]] == values[ordinal - 12] or (gaps and ordinal == 143)
    validated = learner.validate([])
    past = values[:120]
    errors = np.abs(values[120:132] - values[108:120])
    scale = np.abs(past[12:] - past[:-12]).mean()
    assert validated["loss"] == pytest.approx(np.nanmean(errors) / scale)


def test_an_exported_model_forecasts_the_next_times(tmp_path):
    config, data = prepared(tmp_path, firms(), *FIRMS, NAIVE)
    _, model = exported(config, data, tmp_path / "model")
    records = [
        {"firm": firm, "year": year, "invest": value}
        for firm, year, value in firms().sample(frac=1, random_state=1).itertuples(index=False)
    ]
    rows = model.rows(records)
    assert len(rows) == 33
    last = firms().groupby("firm")["invest"].last()
    for row in rows:
        assert row["prediction"] == last[row["firm"]]
        assert row["quantile_0.1"] < row["prediction"] < row["quantile_0.9"]
    assert sorted({row["year"] for row in rows}) == ["1955", "1956", "1957"]
    for change, message in (
        ({"invest": None}, "no 'invest'"),
        ({"invest": float("inf")}, "is inf"),
        ({"year": "1954-01-01"}, "not among whole numbers"),
        ({"invest": -1.0}, "two values at"),
    ):
        with pytest.raises(ValueError, match=message):
            model.rows([*records, {**records[0], **change}])
    with pytest.raises(ValueError, match="at least 2"):
        model.rows([records[0]])
    assert model.filled(records) == {}
    named = records[0]["firm"]
    within = [year for firm, year, _ in firms().itertuples(index=False) if firm == named][1:3]
    gaps = [one for one in records if one["firm"] != named or one["year"] not in within]
    assert model.filled(gaps) == {named: 2}
    assert len(model.rows(gaps)) == 33
    # Frames and databases write whole numbers as fractions.
    for number in (17, 17.0, np.float64(17), Decimal("17.00"), "17"):
        renamed = [{**one, "firm": number} for one in gaps if one["firm"] == named]
        assert model.filled(renamed) == {"17": 2}
    # A line through every other value, or to a mistyped year, would be forecast from.
    own = [record for record in records if record["firm"] == records[0]["firm"]]
    odd = [record for record in own if record["year"] % 2]
    with pytest.raises(ValueError, match="9 of the 17 times between 1935 and 1953 have no value"):
        model.rows(odd)
    with pytest.raises(ValueError, match="44 of the 63 times between 1935 and 1999"):
        model.rows([*own, {**own[0], "year": 1999}])
    model.gaps = 0.75
    assert len(model.rows(odd)) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{model_type: prophet}", "use auto_arima, auto_ets"),
        ("{model_type: auto_ets, alpha: 1}", "no such setting"),
    ],
)
def test_other_models_and_settings_are_refused(tmp_path, given, message):
    config, data = prepared(tmp_path, firms(), *FIRMS, f"model.config={given}")
    with pytest.raises(BadInput) as caught:
        StatisticalLearner(config, data)
    assert message in f"{caught.value} {caught.value.remedy}"


def test_ets_refuses_a_season_that_it_would_ignore(tmp_path):
    fields = "data.series={time: time, horizon: 12, season: 25}"
    ets = "model.config={model_type: auto_ets}"
    config, data = prepared(tmp_path, monthly(), "data.target=co2", fields, ets)
    with pytest.raises(BadInput, match="no season of 25"):
        StatisticalLearner(config, data)


def test_gaps_are_filled_on_a_line_and_scales_are_of_the_season():
    past = history([40, 0, 20, 10], [8.0, 1.0, 4.0, 2.0], 10)
    assert past.values.tolist() == [1, 2, 4, 6, 8]
    assert (past.last, past.filled) == (40, 1)
    assert naive_scale(past.values, 2) == 3.5 + 0.5 / 3
    assert naive_scale(np.array([1.0, 2.0] * 4), 2) == 1.0
    assert naive_scale(np.ones(5), 2) == 0.0
