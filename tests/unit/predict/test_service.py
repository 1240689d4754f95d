"""The service answers as batch prediction does, names what it refuses, and stays up."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from typer.testing import CliRunner

from steadytrain.components.predict import model, service
from steadytrain.components.predict.model import Input, ServedModel
from steadytrain.components.predict.service import Limits, application, check_origin
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tabular.model import Preparation, TableModel
from steadytrain.pipelines.cli import app

from support.web import served

TOKEN = "c4n4ry-0f-the-service"


class Doubles:
    """A model that doubles x, and rejects 13. It waits until `go` is set."""

    def __init__(self):
        self.sizes, self.go = [], threading.Event()
        self.go.set()
        self.called = threading.Event()

    def predict(self, frame):
        self.called.set()
        assert self.go.wait(600)
        self.sizes.append(len(frame))
        if (frame["x"] == 13).any():
            raise ValueError("13 brings bad luck")
        return pd.DataFrame({"prediction": frame["x"] * 2})


class Sizes:
    """A model of files: how many bytes each has."""

    def predict(self, frame):
        return [len(content) for content in frame["file"]]


def doubling(loaded):
    inputs = [Input("x", "x", "number", required=False), Input("c", "c", "any", required=False)]
    return ServedModel("models:/m/1", inputs, None, loaded)


@pytest.fixture
def serve():
    """Return a function that starts a service in this process."""
    clients = []

    def start(model, limits=None, **access):
        client = TestClient(application(model, limits or Limits(), **access))
        clients.append(client.__enter__())
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


def row(x):
    return {"x": x, "c": "c"}


def test_each_record_has_its_prediction_and_unread_columns_are_named(serve):
    client = serve(doubling(Doubles()))
    answer = client.post("/predict", json={"records": [row(1), {**row("2.5"), "extra": 0}]})
    assert answer.status_code == 200
    assert answer.json() == {
        "model": "models:/m/1",
        "predictions": [{"prediction": 2.0}, {"prediction": 5.0}],
        "missing": {},
        "unread": ["extra"],
    }


def test_every_record_that_cannot_be_predicted_is_named_with_its_reason(serve):
    model = Doubles()
    client = serve(doubling(model), Limits(record_bytes=50))
    records = [row(1), row("seven"), 3, {}, row(2), {"x": 1, "c": "c" * 60}]
    answer = client.post("/predict", json={"records": records})
    assert answer.status_code == 422
    assert [(item["record"], item["reason"]) for item in answer.json()["refused"]] == [
        (1, "wrong_type"),
        (2, "wrong_type"),
        (3, "missing_field"),
        (5, "too_long"),
    ]
    assert "record 1: x is 'seven', not a number" in answer.json()["error"]
    assert model.sizes == []
    answer = client.post("/predict", json={"records": [row(1), row(13), row(2)]})
    assert answer.json()["refused"] == [
        {"record": 1, "reason": "not_predicted", "detail": "13 brings bad luck"}
    ]


def test_column_that_no_record_has_is_refused_not_taken_for_missing(serve):
    client = serve(doubling(Doubles()))
    answer = client.post("/predict", json={"records": [{"x": 1, "C": "c"}]})
    assert answer.status_code == 422
    assert "no record has the column 'c'" in answer.json()["error"]
    assert "the records also have C" in answer.json()["error"]
    answer = client.post("/predict", json={"records": [{"x": 1, "c": None}]})
    assert answer.json()["predictions"] == [{"prediction": 2.0}]


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 200_000, 400, "not JSON"),
        (b'{"records": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[]", 400, "one field records"),
        (b"null", 400, "one field records"),
        (b'{"rows": []}', 400, "one field records"),
        (b'{"records": [], "records": []}', 400, "appears twice"),
        (b'{"records": []}', 400, "at least one"),
        (b'{"records": {"x": 1}}', 400, "not a list"),
        (b'{"records": [{"x": 1, "x": 2, "c": 0}]}', 422, "appears twice"),
        (b'{"records": [{"x": [1], "c": 0}]}', 422, "not a number"),
        (b'{"records": [{"x": {"a": 1}, "c": 0}]}', 422, "cannot be predicted"),
        (b'{"records": [{"x": true, "c": {}}]}', 422, "cannot be predicted"),
        (b'{"records": [{"x": 1e999, "c": 0}]}', 422, "cannot be predicted"),
        (b'{"records": [{"\\ud800": 1}]}', 422, "none of its columns"),
        (b'{"records": ["\\ud800"]}', 422, "not an object"),
    ],
)
def test_hostile_bodies_are_refused_with_what_is_wrong(serve, body, status, part):
    client = serve(doubling(Doubles()))
    answer = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert part in answer.json()["error"]
    assert answer.json()["fix"]
    good = client.post("/predict", json={"records": [row(1)]})
    assert good.json()["predictions"] == [{"prediction": 2.0}]


def test_request_that_is_too_large_is_refused_before_it_is_read(serve):
    client = serve(doubling(Doubles()), Limits(rows=3, bytes=1000))
    answer = client.post("/predict", json={"records": [row(1)] * 4})
    assert (answer.status_code, "4 records, more than 3" in answer.text) == (413, True)
    kind, read = {"content-type": "application/json"}, []

    def endless():
        while len(read) < 1000:
            read.append(1)
            yield b" " * 400

    answer = client.post("/predict", content=b" " * 1001, headers=kind)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    answer = client.post("/predict", content=endless(), headers=kind)
    assert (answer.status_code, "more than 1,000 bytes" in answer.text) == (413, True)


@pytest.mark.parametrize("chunked", [False, True])
def test_client_that_sends_too_much_reads_the_answer(chunked):
    app = application(doubling(Doubles()), Limits(bytes=1000))
    body = b" " * 20_000_000
    with (
        served(app, lifespan="on") as (port, _),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as client,
    ):
        headers = {"content-type": "application/json"}
        client.request("POST", "/predict", iter([body]) if chunked else body, headers)
        assert client.getresponse().status == 413


def test_stop_that_the_loading_of_a_model_loses_ends_the_command(monkeypatch):
    def load(*_):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return doubling(Doubles())

    monkeypatch.setattr(model, "open_model", load)
    monkeypatch.setattr(service, "serve", lambda *_: pytest.fail("it serves"))
    done = CliRunner().invoke(app, ["serve", "m@champion", "--port", "0"])
    assert done.exit_code == 143, done


def test_only_json_is_taken_so_no_other_website_can_post(serve):
    client = serve(doubling(Doubles()))
    answer = client.post("/predict", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert client.get("/predict").status_code == 405
    assert "/predict" in client.get("/other").json()["error"]


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"content-type": "application/json; charset=utf-16"}, "the charset utf-16"),
        ({"content-type": 'application/json;charset="ISO-8859-1"'}, "the charset iso-8859-1"),
        ({"content-encoding": "gzip"}, "the content-encoding gzip"),
    ],
)
def test_body_in_another_encoding_is_refused_by_its_name(serve, headers, part):
    client = serve(doubling(Doubles()))
    body = json.dumps({"records": [row(1)]}).encode()
    plain = {"content-type": "Application/JSON; charset=UTF-8", "content-encoding": "identity"}
    assert client.post("/predict", content=body, headers=plain).status_code == 200
    answer = client.post("/predict", content=body, headers={**plain, **headers})
    assert (answer.status_code, part in answer.json()["error"]) == (415, True)


def test_waiting_requests_are_one_batch_and_each_gets_its_own_answers(serve):
    model = Doubles()
    client = serve(doubling(model), Limits(batch_size=64, seconds=600))
    model.go.clear()
    with ThreadPoolExecutor(16) as threads:
        first = threads.submit(client.post, "/predict", json={"records": [row(0)]})
        assert model.called.wait(600)
        later = [
            threads.submit(client.post, "/predict", json={"records": [row(n), row(n + 0.5)]})
            for n in range(1, 13)
        ]
        service = client.app.state.service
        while service.batching.waiting < 24:
            pass
        model.go.set()
        assert first.result().json()["predictions"] == [{"prediction": 0.0}]
        for n, answer in enumerate(later, 1):
            found = [item["prediction"] for item in answer.result().json()["predictions"]]
            assert found == [2.0 * n, 2.0 * n + 1]
    assert model.sizes == [1, 24]


def test_bad_record_of_one_request_leaves_the_others_of_its_batch(serve):
    model = Doubles()
    client = serve(doubling(model), Limits(seconds=600))
    model.go.clear()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(client.post, "/predict", json={"records": [row(0)]})
        assert model.called.wait(600)
        later = [
            threads.submit(client.post, "/predict", json={"records": [row(n)]}) for n in (12, 13)
        ]
        while client.app.state.service.batching.waiting < 2:
            pass
        model.go.set()
        assert [item.result().status_code for item in (first, *later)] == [200, 200, 422]
        assert later[0].result().json()["predictions"] == [{"prediction": 24.0}]


@pytest.mark.slow
def test_model_that_hangs_times_out_and_is_not_ready_and_waiting_is_limited(serve):
    model = Doubles()
    client = serve(doubling(model), Limits(seconds=8, batch_size=1))
    assert client.get("/ready").status_code == 200
    model.go.clear()
    assert client.post("/predict", json={"records": [row(1)]}).status_code == 504
    service = client.app.state.service
    assert client.post("/predict", json={"records": [row(2)]}).status_code == 504
    assert service.batching.waiting == 0
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    with ThreadPoolExecutor(40) as threads:
        sent = [
            threads.submit(client.post, "/predict", json={"records": [row(n)]}) for n in range(40)
        ]
        found = [item.result() for item in sent]
    statuses = {answer.status_code for answer in found}
    # A busy machine may also take too long to read a body.
    assert {503, 504} <= statuses <= {408, 503, 504}
    assert {item.headers.get("retry-after") for item in found if item.status_code == 503} == {"1"}
    model.go.set()
    while service.batching.busy_since is not None:
        pass
    assert client.get("/ready").status_code == 200
    assert client.post("/predict", json={"records": [row(3)]}).status_code == 200
    assert 2 not in model.sizes


def test_files_come_in_base64(serve):
    inputs = [Input("file", "file", "bytes", required=True)]
    client = serve(ServedModel("models:/m/1", inputs, None, Sizes()))
    content = base64.b64encode(b"\x00\xff picture").decode()
    answer = client.post("/predict", json={"records": [{"file": content}]})
    assert answer.json()["predictions"] == [{"prediction": 10}]
    for wrong in ("not base64!", 7):
        answer = client.post("/predict", json={"records": [{"file": wrong}]})
        assert (answer.status_code, answer.json()["refused"][0]["reason"]) == (422, "wrong_type")


def test_schema_is_that_of_the_signature(serve):
    inputs = [Input("x", "x", "number", False), Input("", "body", "text", True)]
    client = serve(ServedModel("models:/m/1", inputs, None, Doubles()), Limits(rows=7))
    found = client.get("/schema").json()
    assert found["records"] == {
        "type": "object",
        "properties": {"x": {"type": ["number", "null"]}, "body": {"type": "string"}},
        "required": ["body"],
    }
    assert found["limits"] == {
        "rows": 7,
        "bytes": 1_000_000,
        "record_bytes": 1_000_000,
        "seconds": 30,
    }
    described = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]
    schema = described["content"]["application/json"]["schema"]
    assert schema["properties"]["records"]["items"] == found["records"]


def test_metrics_count_requests_records_and_batches(serve):
    client = serve(doubling(Doubles()))
    client.post("/predict", json={"records": [row(1), row(2)]})
    client.post("/predict", json={"records": [row(13)]})
    client.post("/predict", content=b"")
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {
        (item.name, item.labels.get("status", "")): item.value
        for family in families
        for item in family.samples
    }
    assert {status: found["serve_requests_total", status] for status in ("200", "415", "422")} == {
        "200": 1,
        "415": 1,
        "422": 1,
    }
    assert found["serve_records_total", ""] == 2
    assert (found["serve_batch_records_count", ""], found["serve_batch_records_sum", ""]) == (2, 3)
    assert found["serve_waiting_records", ""] == 0


def test_values_that_the_model_takes_for_missing_are_in_the_answer_and_the_metrics(serve):
    learned = TableModel(Preparation({"c": "category"}, {"c": ["a", "b"]}), [], [1.0])
    inputs = [Input("x", "x", "number", False), Input("c", "town", "any", False)]
    client = serve(ServedModel("models:/m/1", inputs, None, Doubles(), unseen=learned.unseen))
    towns = ["a", "B", None, "c", "b"]
    records = [{"x": n, "town": town} for n, town in enumerate(towns)]
    answer = client.post("/predict", json={"records": records})
    assert answer.json()["missing"] == {"town": 3}
    client.post("/predict", json={"records": records[1:2]})
    # A request without an answer has no value that the model took.
    client.post("/predict", json={"records": [{"x": 13, "town": None}]})
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {
        item.labels["column"]: item.value
        for family in families
        for item in family.samples
        if item.name == "serve_missing_values_total"
    }
    assert found == {"town": 4}


def test_a_single_text_is_never_missing(serve):
    class Upper:
        def predict(self, texts):
            return [text.upper() for text in texts]

    client = serve(ServedModel("m", [Input("", "text", "text", required=True)], None, Upper()))
    answer = client.post("/predict", json={"records": [{"text": "NA"}]})
    assert (answer.json()["predictions"], answer.json()["missing"]) == ([{"prediction": "NA"}], {})


def test_without_the_token_only_probes_and_metrics_answer(serve):
    client = serve(doubling(Doubles()), token=TOKEN)
    for path in ("/health", "/ready", "/metrics"):
        assert client.get(path).status_code == 200
    content = {"records": [row(1)]}
    for wrong in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Basic {TOKEN}"}):
        assert client.get("/schema", headers=wrong).status_code == 401
        assert client.post("/predict", json=content, headers=wrong).status_code == 401
    right = {"authorization": f"Bearer {TOKEN}"}
    assert client.post("/predict", json=content, headers=right).status_code == 200


def test_website_whose_name_leads_here_is_turned_away(serve):
    client = serve(doubling(Doubles()), hosts=("127.0.0.1", "localhost"))
    assert client.get("/schema", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/schema", headers={"host": "localhost:8485"}).status_code == 200


def test_only_named_front_ends_may_call_from_a_browser(serve):
    app = "https://app.example.com"
    client = serve(doubling(Doubles()), token=TOKEN, origins=[app])

    def preflight(origin):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type"
        return client.options("/predict", headers=asked)

    assert preflight(app).headers["access-control-allow-origin"] == app
    assert preflight("https://evil.example").status_code == 400
    right = {"authorization": f"Bearer {TOKEN}", "origin": app}
    answer = client.post("/predict", json={"records": [row(1)]}, headers=right)
    assert answer.headers["access-control-allow-origin"] == app
    # Without it, a browser would hide why the request was refused.
    refused = client.post("/predict", json={}, headers={"origin": app})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, app)


@pytest.mark.parametrize("origin", ["https://app.example.com", "http://localhost:3000"])
def test_origins_are_taken(origin):
    check_origin(origin)


@pytest.mark.parametrize(
    "origin",
    ["*", "app.example.com", "https://a.example/", "https://u:p@a.example", "https://a:x", "null"],
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(BadInput, match="--cors-origin"):
        check_origin(origin)


def test_forecasts_take_all_records_as_one_history(serve):
    class Next:
        def predict(self, frame):
            if frame["x"].sum() > 10:
                raise ValueError("two values at one time")
            return pd.DataFrame({"prediction": [frame["x"].sum(), *[len(frame)] * 6]})

    inputs = [Input(name, name, "number", required=name == "x") for name in ("x", "value")]
    model = ServedModel("models:/m/1", inputs, None, Next(), forecasts=True)
    client = serve(model)
    # The last one has no value yet.
    records = [{"x": n, "value": None if n == 4 else n} for n in range(5)]
    answer = json.loads(client.post("/predict", json={"records": records}).text)
    # More than there are records.
    assert answer["predictions"] == [{"prediction": 10}, *[{"prediction": 5}] * 6]
    # No half of it is forecast instead.
    refused = client.post("/predict", json={"records": [*records, {"x": 1}]})
    assert refused.status_code == 422
    assert "two values at one time" in refused.text
    assert (answer["missing"], answer["filled"]) == ({}, {})
