"""In which order the portfolio of tables finds good models soonest, on tables for development.

Run with `pytest -m bench tests/bench/test_portfolio.py -s`. The tables are those that scikit-learn
and statsmodels ship; `test_automl.py` reports on others. Each configuration learns as in a search,
with early stopping on the validation side, and is scored on the test side of several splits.

As in auto-sklearn 2 (Feurer et al. 2022) and AutoGluon's zero-shot portfolios (Salinas and Erickson
2024), each place goes to the configuration with which the best one so far is best on average. A
loss counts from 0, the best of a split, to 1, the median, and no more. The dummy, the linear model
and LightGBM's defaults, which a board is compared with, come first, and the first eight (`fast`)
are none of the slow families. STEADYTRAIN_BENCH_TABLES and STEADYTRAIN_BENCH_SPLITS choose a part;
STEADYTRAIN_BENCH_LOSSES is a file that keeps the losses, so that a later run continues.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.datasets as more

from steadytrain.components.automl.design import _FAST
from steadytrain.components.automl.portfolio import DEFAULT, families, portfolio
from steadytrain.components.automl.unit_scores import losses_of
from steadytrain.components.evaluate.scoring import judged_records
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.tabular.model import load
from steadytrain.components.tabular.scoring import TableClassScorer, TableNumberScorer
from steadytrain.components.train.step import load_trainer

from support.tables import REGRESSION, prepared, shipped

pytestmark = pytest.mark.bench
TABLES = os.environ.get(
    "STEADYTRAIN_BENCH_TABLES", "iris wine breast_cancer diabetes anes96 fair digits"
).split()
SPLITS = int(os.environ.get("STEADYTRAIN_BENCH_SPLITS", "3"))
ANY_TABLE = from_mapping(
    {
        "name": "any",
        "data": {"task": "tabular_classification", "source": ["none.csv"], "target": "y"},
        "model": {"framework": "lightgbm", "config": {"model_type": "lightgbm"}},
    }
)
PINNED = ("dummy", "linear", DEFAULT)
SLOW = 40.0
"""Seconds for a million values from which a family is not among the first."""


def table(name):
    if name == "anes96":
        rows = more.anes96.load_pandas().data
        return rows.assign(target="party " + rows.pop("PID").astype(str))
    if name == "fair":
        rows = more.fair.load_pandas().data
        return rows.assign(target=np.where(rows.pop("affairs") > 0, "yes", "no"))
    return shipped(name)


def loss_of(config, data, item, folder):
    """Return the loss of a configuration on the test side."""
    family = families()[item.family]
    own = from_mapping(changed(config, item.fields(family)))
    new, patience = load_trainer(family.framework).learner, own.training.early_stopping_patience
    learner, best, since = new(own, data), (np.inf, None), 0
    for _ in range(own.training.max_steps):
        learner.learn([], learning_rate_scale=1.0)
        loss = learner.validate([])["loss"]
        if patience is None or loss < best[0]:
            best, since = (loss, {key: it.copy() for key, it in learner.state().items()}), 0
        else:
            since += 1
        if since == patience:
            break
    kept = new(own, data)
    kept.restore(best[1])
    folder.mkdir()
    kept.export(folder)
    scorer = TableNumberScorer if config.data.task == "tabular_regression" else TableClassScorer
    records = judged_records(config, data)
    return float(losses_of(scorer(config, data).score({"model": load(folder)}, records)).mean())


def losses(tmp_path):
    """Return the losses by table and split, and by configuration."""
    kept = os.environ.get("STEADYTRAIN_BENCH_LOSSES")
    path = Path(kept or tmp_path / "losses.json")
    found = json.loads(path.read_text()) if path.exists() else {}
    known, _ = portfolio(ANY_TABLE)
    for name in TABLES:
        rows, task = table(name), [REGRESSION] if name == "diabetes" else []
        for split in range(SPLITS):
            folder = tmp_path / f"{name}-{split}"
            folder.mkdir()
            cell = found.setdefault(f"{name} {split}", {})
            sides = ["data.validation_share=0.1", "data.test_share=0.25"]
            config, data = prepared(folder, rows, *task, *sides, f"data.split_salt='{split}'")
            for place, item in enumerate(known):
                if item.name not in cell:
                    cell[item.name] = loss_of(config, data, item, folder / str(place))
                    path.write_text(json.dumps(found))
            print(name, split, {key: round(value, 4) for key, value in cell.items()}, flush=True)
    return pd.DataFrame(found).T[[item.name for item in known]]


def scaled(frame):
    best = frame.min(axis=1)
    width = (frame.median(axis=1) - best).where(lambda it: it > 0, 1.0)
    return frame.sub(best, axis=0).div(width, axis=0).clip(upper=1.0)


def learned(frame):
    """Return the configurations in the order that is best on average."""
    known, slow = families(), set()
    for item in portfolio(ANY_TABLE)[0]:
        if known[item.family].seconds >= SLOW:
            slow.add(item.name)
    names, scores = list(PINNED), scaled(frame)
    while len(names) < len(frame.columns):
        left = [name for name in frame.columns if name not in names]
        if len(names) < _FAST:
            left = [name for name in left if name not in slow]
        best = scores[names].min(axis=1)
        # Of configurations that add nothing, the one that is best alone.
        gains = {
            name: (np.minimum(best, scores[name]).mean(), scores[name].mean()) for name in left
        }
        names.append(min(gains, key=gains.__getitem__))
    return names


def test_order_that_finds_good_models_soonest(tmp_path):
    frame = losses(tmp_path)
    order, today = learned(frame), list(frame.columns)
    print("\n".join(f"{place:2} {name}" for place, name in enumerate(order)))
    scores, split_of, kept_out = scaled(frame), frame.index.str.split().str[0], []
    for name in dict.fromkeys(split_of):
        here = scores[split_of == name]
        for others, names in (
            ("learned", learned(frame[split_of != name])),
            ("today", today),
        ):
            for first in (4, 8, 12):
                score = here[names[:first]].min(axis=1).mean()
                kept_out.append({"order": others, "first": first, "table": name, "score": score})
    means = pd.DataFrame(kept_out).pivot_table("score", "table", ["first", "order"], margins=True)
    print(means.round(3).to_string())
    assert sorted(order) == sorted(today)
