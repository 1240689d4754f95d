"""The network of series: the same steps as plain PyTorch, and forecasts from NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from steadytrain.components.series.model import load
from steadytrain.components.series.network_member import NetworkMember
from steadytrain.components.series.tasks import FORECASTING
from steadytrain.components.series.training import Forecasting, Network
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.checkpoint import Checkpoint
from steadytrain.components.train.loop.data import Rows

from support.benches import one_thread
from support.series import FIRMS, firms, prepared, promoted
from support.training import TWENTY_STEPS, Bench, events_of, losses_of

__all__ = ["one_thread"]
NETWORK = [
    "model.framework=pytorch",
    "model.config={model_type: mlp, width: 16, blocks: 1, context: 8}",
    *TWENTY_STEPS,
    "compute.threads_per_rank=1",
]
PROMOTED = [
    "data.target=sold",
    "data.series={column: shop, time: day, horizon: 14, covariates: [price, holiday]}",
]
pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path):
    """Return a function that makes a run on firms."""

    def made(*overrides, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        config, data = prepared(folder, firms(), *FIRMS, *NETWORK, *overrides)
        return Bench(Path(config.output), data, config)

    return made


def by_hand(data):
    """Return the losses of the same training, and the network, from the table by pandas and torch.

    A window is the eight years before its own; its targets are three years from there on.
    """
    table = firms()
    past = {
        firm: values["invest"].to_numpy()[:-6]
        for firm, values in table.sort_values("year").groupby("firm")
    }
    first = table["year"].astype(int).min()
    rows = Rows([data.path(name) for name in data.sides["train"].shards])
    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)]
    last = torch.nn.Linear(16, 9)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    parameters = [weight for layer in (*layers, last) for weight in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    order, losses = RowOrder(len(rows), seed=5), []
    for step in range(20):
        total, count = torch.zeros(()), 0
        for index in order.take(16 * step, 16):
            values = past[rows[index]["series"]]
            origin = max(1, int(rows[index]["time"]) - first)
            seen = values[max(0, origin - 8) : origin]
            center, scale = seen.mean(), seen.std()
            if scale <= 1e-9 * max(1.0, abs(center)):
                scale = max(1.0, abs(center))
            inputs = np.zeros(16)
            inputs[8 - len(seen) : 8], inputs[16 - len(seen) :] = (seen - center) / scale, 1
            hidden = torch.relu(layers[0](torch.tensor(inputs, dtype=torch.float32)))
            hidden = hidden + layers[2](torch.relu(layers[1](hidden)))
            found = last(hidden).view(3, 3) + inputs[7]
            unit = np.abs(np.diff(values)).mean()
            for ahead, value in enumerate(values[origin : origin + 3]):
                for level, quantile in zip((0.1, 0.5, 0.9), found[ahead], strict=True):
                    apart = (value - center) / scale - quantile
                    total = total + max(level * apart, (level - 1) * apart) / 3 * scale / unit
                count += 1
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_agree_with_a_loop_written_by_hand(bench):
    made = bench()
    made.train_here()
    ours = [loss for _, loss in sorted(losses_of(made.workspace).items())]
    assert ours == pytest.approx(by_hand(made.data), rel=1e-4)
    assert ours[-1] < ours[0]
    declared = FORECASTING.metrics(made.config)
    validated = events_of(made.workspace, Validated)
    assert len(validated) == 2
    for one in validated:
        assert {*one.metrics} == {*declared}
    # What is validated is what the exported model forecasts.
    from steadytrain.components.series.errors import errors, read_values

    model = load(made.workspace.model)
    best = min(validated, key=lambda one: one.metrics["loss"])
    sides = [read_values(made.data, model.calendar, side) for side in ("train", "validation")]
    found = errors(model, *sides)
    assert found["scaled_error"].mean() == pytest.approx(best.metrics["loss"], rel=1e-5)
    assert found["absolute_error"].mean() == pytest.approx(best.metrics["mae"], rel=1e-5)
    squared = found["squared_error"].mean()
    assert np.sqrt(squared) == pytest.approx(best.metrics["rmse"], rel=1e-5)


def weights(made):
    return load_file(made.workspace.model / "model.safetensors")


def test_resumed_run_has_the_same_weights(bench):
    # The second run lacks the checkpoint of step 10, which may be the best.
    last = "training.load_best_model_at_end=false"
    whole, made = bench(last), bench(last, name="other")
    whole.train_here()
    made.train_here(2, resume_from=whole.workspace.checkpoints / "step-00000010")
    expected, found = weights(whole), weights(made)
    assert {*found} == {*expected}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_member_of_an_ensemble_learns_what_a_run_has_learned_when_it_stops_there(bench):
    whole = bench("training.lr_scheduler_type=linear")
    whole.train_here()
    member = NetworkMember(whole.config, whole.data)
    learned = [member.learn((), learning_rate_scale=1.0) for _ in range(10)]
    expected = Checkpoint.at(whole.workspace.checkpoints / "step-00000010").tensors("model")
    state = member.state()
    assert {*state} == {*expected}
    assert all((state[name] == it.numpy()).all() for name, it in expected.items())
    losses = losses_of(whole.workspace)
    assert [it.loss for it in learned] == [losses[step] for step in range(1, 11)]
    # Half of the schedule is over.
    assert learned[-1].learning_rate == pytest.approx(3e-3 * 11 / 20)


def test_a_smaller_micro_batch_learns_the_same(bench):
    whole, made = bench(), bench("training.micro_batch_size=4", name="other")
    whole.train_here()
    made.train_here()
    assert losses_of(made.workspace) == pytest.approx(losses_of(whole.workspace), abs=1e-5)


def test_windows_see_neither_their_targets_nor_the_validation_side(bench):
    made = bench()
    part = Forecasting(made.config, made.data)
    rows = Rows([made.data.path(name) for name in made.data.sides["train"].shards])
    batch = part.collate([rows[index] for index in range(len(rows))])
    table = dict(iter(firms().groupby("firm")))
    for index in range(len(rows)):
        values = table[rows[index]["series"]].sort_values("year")["invest"].to_numpy()
        origin = max(1, int(rows[index]["time"]) - 1935)
        expected = [*values[origin : min(origin + 3, 14)]]
        found = batch["targets"][index]
        assert found[~found.isnan()].tolist() == expected
        seen = batch["inputs"][index, :8] * batch["scale"][index] + batch["center"][index]
        known = batch["inputs"][index, 8:16].bool()
        assert seen[known].numpy() == pytest.approx(values[max(0, origin - 8) : origin], rel=1e-4)


def test_an_exported_network_forecasts_with_covariates_as_torch_does(tmp_path):
    table = promoted()
    overrides = [*PROMOTED, *NETWORK, "training.max_steps=200", "training.eval_steps=50"]
    config, data = prepared(tmp_path, table, *overrides)
    made = Bench(Path(config.output), data, config)
    made.train_here()
    model = load(made.workspace.model)
    # Two numbers for each of month and day of the week, and two covariates, of 22 times.
    assert model.size == 16 + 22 * 6
    network = Network(model.size, 14, 16, 1)
    network.load_state_dict({name: torch.from_numpy(it) for name, it in model.weights.items()})
    inputs = np.random.default_rng(0).normal(size=(5, model.size)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(inputs), torch.zeros(5, 14)).numpy()
    assert model.outputs(inputs.astype(np.float64)) == pytest.approx(expected, abs=1e-4)
    records = table.to_dict("records")
    days = [str(day.date()) for day in pd.date_range(table["day"].max(), periods=15)[1:]]

    def forecast(price):
        return model.rows(
            [
                *records,
                *(
                    {"shop": shop, "day": day, "price": price, "holiday": 0.0}
                    for shop in ("NA", "north", "south")
                    for day in days
                ),
            ]
        )

    low, high = (np.array([row["prediction"] for row in forecast(price)]) for price in (1.0, 3.0))
    # The table sells 8 less at the higher price.
    assert 3 < (low - high).mean() < 13
    for row in forecast(2.0):
        assert row["quantile_0.1"] <= row["prediction"] <= row["quantile_0.9"]
    metrics = [one.metrics["loss"] for one in events_of(made.workspace, Validated)]
    assert min(metrics) < 0.8
    assert json.loads((made.workspace.model / "series.json").read_text())["covariates"] == [
        "price",
        "holiday",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{model_type: nhits}", "has no such model for series"),
        ("{model_type: mlp, width: 0}", "model.config.width = 0"),
        ("{model_type: mlp, depth: 2}", "model.config.depth = 2"),
    ],
)
def test_other_models_and_settings_are_refused(tmp_path, given, message):
    fields = [*NETWORK, f"model.config={given}"]
    config, data = prepared(tmp_path, firms(), *FIRMS, *fields)
    with pytest.raises(BadInput, match=message):
        Forecasting(config, data)


def test_pytorch_reads_all_of_training_and_other_frameworks_do_not(tmp_path):
    config, _ = prepared(tmp_path, firms(), *FIRMS, *NETWORK, "training.optim=lion")
    check_task(config)
    boosted = {"framework": "mlforecast", "config": {"model_type": "lightgbm"}}
    other = from_mapping(config.model_dump(mode="json") | {"model": boosted})
    with pytest.raises(ConfigError, match=r"training.global_batch_size .* does not read it"):
        check_task(other)
