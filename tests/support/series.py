"""Real time series that statsmodels ships, as CSV files, and their prepared data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from statsmodels import datasets

from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.records import DataRecord

from support.tables import write_csv


def firms() -> pd.DataFrame:
    """Return what eleven firms invested in each year from 1935 to 1954: firm, year, invest."""
    return datasets.grunfeld.load_pandas().data[["firm", "year", "invest"]]


def firms_for_nixtla() -> pd.DataFrame:
    """Return the firms with the columns and the order that mlforecast and its peers expect."""
    table = firms().rename(columns={"firm": "unique_id", "year": "ds", "invest": "y"})
    return table.astype({"ds": int}).sort_values(["unique_id", "ds"])


def monthly(years: int = 12) -> pd.DataFrame:
    """Return the last years of the carbon dioxide in the air, by month: time, co2."""
    weeks = datasets.co2.load_pandas().data["co2"]
    months = weeks.resample("MS").mean().interpolate().iloc[-12 * years :]
    return pd.DataFrame({"time": months.index.strftime("%Y-%m-%d"), "co2": months.to_numpy()})


def promoted() -> pd.DataFrame:
    """Return what three shops sold each day, of which price and holidays are known ahead.

    It is made up: packages ship no series with covariates of the future. One shop is called NA.
    """
    rng, days = np.random.default_rng(0), pd.date_range("2023-01-01", periods=200)
    tables = []
    for level, shop in ((20, "north"), (40, "south"), (30, "NA")):
        price = rng.choice([1.0, 2.0, 3.0], len(days))
        holiday = (rng.random(len(days)) < 0.1).astype(int)
        week = 5 * np.sin(2 * np.pi * days.dayofweek / 7)
        sold = level + week - 4 * price + 6 * holiday + rng.normal(0, 0.5, len(days))
        columns = {"shop": shop, "day": days.strftime("%Y-%m-%d"), "sold": sold.round(3)}
        tables.append(pd.DataFrame({**columns, "price": price, "holiday": holiday}))
    return pd.concat(tables, ignore_index=True)


FIRMS = ["data.target=invest", "data.series={column: firm, time: year, horizon: 3}"]
MONTHLY = ["data.target=co2", "data.series={time: time, horizon: 12}"]


def series_config(source: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run in the folder of its table."""
    fields = [f"data.source=[{source}]", f"output={source.parent / 'output'}", "run=series"]
    return load("series", [*fields, *overrides])


def prepared(
    folder: Path, records: pd.DataFrame | Iterable[Mapping[str, Any]], *overrides: str
) -> tuple[RunConfig, DataRecord]:
    """Write a table of series, and prepare it."""
    config = series_config(write_csv(folder, records), *overrides)
    return config, preprocess(config)


def by_mlforecast(
    table: pd.DataFrame,
    dates: int | str,
    names: list[str] | None,
    horizon: int,
    *,
    lags: list[int],
    windows: list[int],
    differences: list[int],
    **settings: Any,
) -> Any:
    """Return the last times of series with their forecasts from those before, by mlforecast itself.

    Args:
        table: unique_id, ds and y, and covariates.
        settings: of LightGBM.
    """
    from lightgbm import LGBMRegressor
    from mlforecast import MLForecast
    from mlforecast.lag_transforms import RollingMean, RollingStd
    from mlforecast.target_transforms import Differences, LocalStandardScaler

    rolling = [
        kind(size, min_samples=least)
        for size in windows
        for kind, least in ((RollingMean, 1), (RollingStd, 2))
    ]
    given = {"n_estimators": 40, "min_child_samples": 5, **settings}
    made = MLForecast(
        models={
            "trees": LGBMRegressor(
                random_state=0,
                deterministic=True,
                force_row_wise=True,
                boost_from_average=False,
                n_jobs=1,
                verbosity=-1,
                **given,
            )
        },
        freq=dates,
        lags=lags,
        lag_transforms={1: rolling},
        date_features=names,
        target_transforms=[
            *([Differences(differences)] if differences else []),
            LocalStandardScaler(),
        ],
    )
    past = table.groupby("unique_id").head(-horizon)
    held_out = table.groupby("unique_id").tail(horizon)
    made.fit(past, static_features=[], dropna=False)
    known = held_out.drop(columns="y") if len(table.columns) > 3 else None
    return held_out.merge(made.predict(horizon, X_df=known), on=["unique_id", "ds"])
