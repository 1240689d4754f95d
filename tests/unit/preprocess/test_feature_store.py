"""Tables of a real Feast store: as of each record's time, with every record, or refused by name."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from steadytrain.components.preprocess import feature_store
from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.feature_address import FeatureAddress
from steadytrain.pipelines.early_checks import check_here, check_submitted

START = pd.Timestamp("2024-01-01", tz="UTC")
STORE = """\
project: shop
provider: local
registry: registry.db
offline_store: {type: file}
entity_key_serialization_version: 3
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A store of 20 customers, one row each 5 days that is valid for 30 days, and of all shops."""
    from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource
    from feast.on_demand_feature_view import on_demand_feature_view
    from feast.types import Float32, Float64
    from feast.value_type import ValueType

    folder = tmp_path_factory.mktemp("shop")
    (folder / "feature_store.yaml").write_text(STORE)
    rows = [
        {"customer": customer, "event_timestamp": START + pd.Timedelta(days=day), "spent": spent}
        for customer in range(20)
        for day in range(0, 40, 5)
        for spent in [100.0 * customer + day]
    ]
    pd.DataFrame(rows).to_parquet(folder / "orders.parquet")
    customer = Entity(name="customer", join_keys=["customer"], value_type=ValueType.INT64)
    orders = FeatureView(
        name="orders",
        entities=[customer],
        ttl=dt.timedelta(days=30),
        schema=[Field(name="spent", dtype=Float32)],
        source=FileSource(path="orders.parquet", timestamp_field="event_timestamp"),
        online=False,
    )
    days = pd.DataFrame({"event_timestamp": [START, START + pd.Timedelta(days=80)]})
    days.assign(price=[1.0, 2.0]).to_parquet(folder / "prices.parquet")
    # It joins by the time alone, and never expires.
    prices = FeatureView(
        name="prices",
        schema=[Field(name="price", dtype=Float32)],
        source=FileSource(path="prices.parquet", timestamp_field="event_timestamp"),
        online=False,
    )

    @on_demand_feature_view(sources=[orders], schema=[Field(name="twice", dtype=Float64)])
    def computed(rows: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"twice": 2 * rows["spent"]})

    service = FeatureService(name="churn", features=[orders, prices])
    referred = orders.with_join_key_map({"customer": "friend"})
    friends = FeatureService(name="friends", features=[referred])
    FeatureStore(str(folder)).apply([customer, orders, prices, computed, service, friends])
    return folder


# What customers spent has expired on day 90, there is no customer 20, and one row is there twice.
DAYS = [17, 4, 90] * 3 + [17]
LABELS = pd.DataFrame(
    {
        "customer": [3] * 3 + [0] * 3 + [20] * 3 + [3],
        "event_timestamp": [START + pd.Timedelta(days=day, hours=1) for day in DAYS],
        "left": [0, 1] * 5,
    }
)


def spent(customer, time):
    """Return the last amount before a time, unless it is older than 30 days."""
    days = (time - START).days
    last = min(days // 5 * 5, 35)
    return 100.0 * customer + last if customer < 20 and days - last <= 30 else None


def expected():
    return [spent(*row) for row in LABELS[["customer", "event_timestamp"]].itertuples(index=False)]


def retrieved(address, result):
    """Return the table at an address, retrieved in this process."""
    wanted = FeatureAddress.parse(address)
    list(feature_store._retrieve(address, wanted, Path(wanted.folder), result))
    return pq.read_table(result).to_pandas()


def settings(address):
    return from_mapping(
        {
            "name": "a",
            "data": {"source": [address], "task": "tabular_classification", "target": "left"},
            "model": {"framework": "lightgbm", "config": {"model_type": "lightgbm"}},
        }
    )


def source_file(address):
    ((file, _),) = find_inputs(settings(address).data).files
    return file


def begin_command():
    """Let the next table be retrieved again, as by another command."""
    if home := os.environ.pop("STEADYTRAIN_FEATURES", ""):
        shutil.rmtree(home)


@pytest.fixture(autouse=True)
def alone():
    begin_command()
    yield
    begin_command()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "what"),
    [("csv", "service=churn"), ("parquet", "features=orders:spent,prices:price")],
)
def test_each_row_has_its_features_at_its_time_and_none_is_lost(shop, tmp_path, suffix, what):
    labels = tmp_path / f"labels.{suffix}"
    LABELS.to_csv(labels, index=False) if suffix == "csv" else LABELS.to_parquet(labels)

    address = f"feast:{shop}?{what}&entities={labels}"
    file = source_file(address)

    assert file.name == address, "records are named by what the user gave"
    table = pq.read_table(file.location).to_pandas()
    assert table.columns.tolist() == ["customer", "event_timestamp", "left", "spent", "price"]
    given = table[LABELS.columns].astype({"customer": int, "left": int})
    pd.testing.assert_frame_equal(given, LABELS, check_dtype=False)
    wanted = expected()
    assert [None if pd.isna(value) else value for value in table["spent"]] == wanted
    assert wanted.count(None) == 5
    assert table["price"].tolist() == [2.0 if day == 90 else 1.0 for day in DAYS]


@pytest.mark.slow
def test_a_store_that_is_not_of_files_joins_itself(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store, "_has_files", lambda store: False)
    LABELS.to_parquet(tmp_path / "labels.parquet")
    address = f"feast:{shop}?service=churn&entities={tmp_path / 'labels.parquet'}"
    table = retrieved(address, tmp_path / "result.parquet")
    assert [None if pd.isna(value) else value for value in table["spent"]] == expected()
    assert table["price"].tolist() == [2.0 if day == 90 else 1.0 for day in DAYS]


def apply(folder, rows, key, features, **source):
    """Make a store with the view "v" of files that never expires; the service joins it twice."""
    from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource
    from feast.types import Float64
    from feast.value_type import ValueType

    (folder / "feature_store.yaml").write_text(STORE)
    (folder / "v").mkdir()
    for part in range(3):
        rows[part::3].to_parquet(folder / "v" / f"{part}.parquet", index=False)
    entity = Entity(name=key, join_keys=[key], value_type=ValueType.STRING)
    view = FeatureView(
        name="v",
        entities=[entity],
        schema=[Field(name=name, dtype=Float64) for name in features],
        source=FileSource(path="v", timestamp_field="time", **source),
        online=False,
    )
    twice = [
        view[[name]].with_name(column).with_join_key_map({key: column})
        for name, column in zip(features, ("origin", "goal"), strict=False)
    ]
    FeatureStore(str(folder)).apply([entity, view, FeatureService(name="twice", features=twice)])


@pytest.mark.slow
@pytest.mark.parametrize("zone", [None, "America/New_York"])
def test_of_rows_of_one_time_the_one_made_last_counts_whatever_the_files(tmp_path, zone):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "user": rng.choice(["01", "02", "03"], 400),
            "time": (START + pd.to_timedelta(rng.integers(0, 20, 400), unit="D")),
            "made": START + pd.to_timedelta(rng.permutation(400), unit="h"),
            "value": rng.normal(size=400),
        }
    )
    rows["time"] = rows["time"].dt.tz_convert(zone)
    apply(tmp_path, rows, "user", ["value"], created_timestamp_column="made")
    labels = pd.DataFrame({"user": rng.choice(["01", "02", "03"], 90), "left": 0})
    labels["event_timestamp"] = START + pd.to_timedelta(rng.integers(0, 40, 90) * 12 + 6, unit="h")
    labels.to_csv(tmp_path / "labels.csv", index=False)

    address = f"feast:{tmp_path}?features=v:value&entities={tmp_path / 'labels.csv'}"
    table = retrieved(address, tmp_path / "result.parquet")

    times = pd.to_datetime(rows["time"], utc=True)
    for user, time, value in zip(
        labels["user"], labels["event_timestamp"], table["value"], strict=True
    ):
        past = rows[(rows["user"] == user) & (times <= time)]
        last = past.assign(time=times).sort_values(["time", "made"])["value"].tail(1).tolist()
        assert last == ([] if pd.isna(value) else [value])


@pytest.mark.slow
def test_a_view_may_be_there_twice_and_texts_stay_texts(tmp_path):
    rows = pd.DataFrame({"place": [f"{at:03d}" for at in range(9)], "time": START})
    rows = rows.assign(x=range(9), y=range(10, 19))
    apply(tmp_path, rows, "place", ["x", "y"])
    labels = pd.DataFrame(
        {
            "origin": ["001", "002"],
            "goal": ["003", "004"],
            "zip": ["01234", "1234"],
            "event_timestamp": ["2024-03-04", "2024-03-05T10:00:00+02:00"],
        }
    )

    def table(kind):
        return retrieved(
            f"feast:{tmp_path}?service=twice&entities={tmp_path}/labels.{kind}",
            tmp_path / "result.parquet",
        )

    labels.to_csv(tmp_path / "labels.csv", index=False)
    labels.to_json(tmp_path / "labels.jsonl", orient="records", lines=True)
    for found in (table("csv"), table("jsonl")):
        assert found["x"].tolist() == [1, 2]
        assert found["y"].tolist() == [13, 14]
        assert found["zip"].tolist() == ["01234", "1234"]
    for time in ("03/04/2024", "1709510400"):
        labels.assign(event_timestamp=time).to_csv(tmp_path / "labels.csv", index=False)
        with pytest.raises(BadInput, match=r"event_timestamp of .* is no time"):
            table("csv")
    labels.assign(goal=[3, 4]).to_parquet(tmp_path / "labels.parquet")
    with pytest.raises(BadInput, match="place is a number in the table of entities, and a text"):
        table("parquet")


@pytest.mark.slow
def test_a_service_may_join_by_another_column_and_a_key_may_be_missing(shop, tmp_path):
    friends = LABELS.assign(friend=[None, *LABELS["customer"][1:]], customer=0)
    friends.to_parquet(tmp_path / "labels.parquet")
    table = pq.read_table(
        source_file(f"feast:{shop}?service=friends&entities={tmp_path / 'labels.parquet'}").location
    ).to_pandas()
    assert table["customer"].eq(0).all()
    wanted = expected()
    values = [None if pd.isna(value) else value for value in table["spent"]]
    assert values == [None, *wanted[1:]]


@pytest.mark.slow
def test_digest_follows_what_the_store_has_and_nothing_else(shop, tmp_path):
    labels = tmp_path / "labels.csv"
    LABELS.to_csv(labels, index=False)
    address, orders = f"feast:{shop}?service=churn&entities={labels}", shop / "orders.parquet"
    first = source_file(address).digest()
    assert source_file(address).digest() == first
    begin_command()
    assert source_file(address).digest() == first
    before = orders.read_bytes()
    frame = pd.read_parquet(orders)
    frame.assign(spent=frame["spent"] + 1).to_parquet(orders)
    try:
        assert source_file(address).digest() == first, "one command sees one state of the store"
        begin_command()
        assert source_file(address).digest() != first
    finally:
        orders.write_bytes(before)


@pytest.mark.slow
def test_what_cannot_be_joined_is_refused(shop, tmp_path):
    def refused(labels, why, what="service=churn"):
        labels.to_csv(tmp_path / "labels.csv", index=False)
        address = f"feast:{shop}?{what}&entities={tmp_path / 'labels.csv'}"
        with pytest.raises(BadInput, match=why) as raised:
            retrieved(address, tmp_path / "result.parquet")
        assert raised.value.message.startswith(f"data.source = 'feast:{shop}?")

    refused(
        LABELS.drop(columns="event_timestamp"), "no column event_timestamp; it has customer, left"
    )
    refused(LABELS.assign(event_timestamp="soon"), "event_timestamp of .* is no time")
    refused(LABELS.assign(event_timestamp=[None, *LABELS["event_timestamp"][1:]]), "1 rows of")
    refused(LABELS[:0], "has no rows")
    refused(LABELS.drop(columns="customer"), "orders joins by customer, which .* has not")
    refused(
        LABELS.assign(customer=77),
        "none of the 10 rows of .* has a feature",
        "features=orders:spent",
    )
    refused(LABELS.assign(spent=1), "the feature spent of orders and a column of .* have one name")
    refused(LABELS, "Feature service no does not exist", "service=no")
    refused(LABELS, "the store has not a feature no in orders", "features=orders:no")
    refused(LABELS, "the store has not the view no", "features=no:spent")
    refused(LABELS, "computed is computed on demand", "features=computed:twice")


def test_tables_of_a_command_are_removed_with_it_or_by_a_later_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = """if True:
        import os, sys
        from steadytrain.components.preprocess import feature_store
        print(feature_store._home(), flush=True)
        for signal in sys.argv[1:]:
            os.kill(os.getpid(), int(signal))
    """

    def home(*signals):
        done = subprocess.run([sys.executable, "-c", program, *signals], capture_output=True)
        return Path(done.stdout.decode().strip())

    ended = home()
    assert ended.parent == tmp_path
    assert not ended.exists()
    killed = home("9")
    assert killed.is_dir()
    home()
    assert not killed.exists()
    monkeypatch.setenv("STEADYTRAIN_FEATURES", str(killed))
    assert home().name != killed.name, "a folder that is gone is not used"


def test_a_plus_sign_is_part_of_a_name():
    wanted = FeatureAddress.parse("feast:c++?service=a&entities=c++/labels%20of+May.csv")
    assert (wanted.folder, wanted.entities) == ("c++", "c++/labels of+May.csv")


def test_address_is_checked_before_anything_is_read(tmp_path, monkeypatch):
    for rest, why in (
        ("", "give feast:FOLDER"),
        ("shop?service=a", "names nothing"),
        ("shop?entities=a.csv", "names no features"),
        ("shop?service=a&features=b:c&entities=a.csv", "or a service beside them"),
        ("shop?service=a&entities=a.csv&when=now", "unknown option when"),
        ("shop?service=a&service=b&entities=a.csv", "given twice"),
        ("shop?features=b&entities=a.csv", "'b' is no feature"),
    ):
        with pytest.raises(ConfigError, match=why):
            settings(f"feast:{rest}")
    (tmp_path / "labels.csv").write_text("a\n1\n")
    with pytest.raises(BadInput, match=r"has no feature_store\.yaml"):
        source_file(f"feast:{tmp_path}?service=a&entities={tmp_path / 'labels.csv'}")
    config = settings(f"feast:{tmp_path}/shop?service=a&entities={tmp_path / 'absent.csv'}")
    with pytest.raises(ConfigError) as raised:
        check_here(config)
    assert [problem.value for problem in raised.value.problems] == [
        repr(f"{tmp_path}/shop"),
        repr(f"{tmp_path}/absent.csv"),
    ]
    with pytest.raises(ConfigError, match="is a path on this machine"):
        check_submitted(config)
    monkeypatch.setattr(feature_store, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="Feast is not installed") as missing:
        source_file(f"feast:{tmp_path}?service=a&entities={tmp_path / 'labels.csv'}")
    assert "steadytrain[feast]" in missing.value.remedy
