"""`steadytrain serve` as a process: real models, a real HTTP client, and hostile connections."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import mlflow
import pyarrow as pa
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from steadytrain.components.shared import plugins
from steadytrain.components.tabular.encoder import FEATURES
from steadytrain.components.tabular.scoring import TablePackager
from steadytrain.components.tasks.packaging import log_transformers_model

from support.stores import copy_store
from support.tables import LINEAR, prepared, shipped
from support.tiny import make_classifier, make_tokenizer

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "steadytrain.pipelines.cli"]


@pytest.fixture(scope="module")
def table(tmp_path_factory, empty_store):
    """Return the folder of a logged model of a real table, and records of that table."""
    folder = tmp_path_factory.mktemp("table")
    frame = shipped("breast_cancer")
    config, data = prepared(folder, frame, *LINEAR)
    learner = plugins.load(plugins.TRAINERS, "sklearn").learner(config, data)
    learner.learn([], learning_rate_scale=1.0)
    (folder / "weights").mkdir()
    learner.export(folder / "weights")
    records = frame.drop(columns="target").head(60).to_dict("records")
    example = pa.table({FEATURES: [json.dumps(row) for row in records[:3]]})

    def log():
        return TablePackager(config, data).log_model(
            folder / "weights", name="table", records=example, metadata={}
        )

    return logged(copy_store(empty_store, folder), folder, log), records


@pytest.fixture(scope="module")
def texts(tmp_path_factory, empty_store):
    """Return the folder of a logged classifier of texts, and records."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = make_tokenizer(100)
    make_classifier(tokenizer, ["code", "prose"]).save_pretrained(folder / "weights")
    tokenizer.save_pretrained(folder / "weights")

    def log():
        components = {
            "model": AutoModelForSequenceClassification.from_pretrained(folder / "weights"),
            "tokenizer": AutoTokenizer.from_pretrained(folder / "weights"),
        }
        records = pa.table({"id": ["1"], "text": ["def add(first, second):"]})
        return log_transformers_model(
            components, name="t", records=records, metadata={}, task="text-classification"
        )

    words = "import json and then call the function with a list of names".split()  # noqa: SIM905
    records = [{"text": " ".join(words[: 1 + n % len(words)] * (1 + n % 3))} for n in range(40)]
    return logged(copy_store(empty_store, folder), folder, log), records


def logged(store, folder, log):
    mlflow.set_tracking_uri(store)
    try:
        experiment = mlflow.create_experiment("test", artifact_location=(folder / "a").as_uri())
        with mlflow.start_run(experiment_id=experiment):
            uri = log()
        return mlflow.artifacts.download_artifacts(uri, dst_path=str(folder))
    finally:
        mlflow.set_tracking_uri(None)


@pytest.fixture
def serve():
    """Return a function that serves a model, and returns its address and its process."""
    processes = []

    def start(model, *options):
        process = subprocess.Popen(
            [*COMMAND, "serve", model, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.communicate()
        return line.split()[0], process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def predicted(model, records, folder):
    """Return what `steadytrain predict` answers, without the places of the records."""
    source = folder / "records.jsonl"
    source.write_text("\n".join(map(json.dumps, records)))
    done = subprocess.run(
        [*COMMAND, "predict", model, source], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [{k: v for k, v in row.items() if k not in ("source", "line")} for row in rows]


@pytest.mark.parametrize("kind", ["table", "texts"])
def test_single_concurrent_and_batched_answers_equal_those_of_predict(
    kind, request, serve, tmp_path
):
    model, records = request.getfixturevalue(kind)
    address, process = serve(model, "--batch-size", "16")
    expected = predicted(model, records, tmp_path)
    assert len({str(answer) for answer in expected}) > 5
    with httpx.Client(base_url=address, timeout=300) as client:

        def ask(rows):
            answer = client.post("/predict", json={"records": rows})
            assert answer.status_code == 200, answer.text
            return answer.json()["predictions"]

        assert client.get("/ready").json()["status"] == "ready"
        columns = client.get("/schema").json()["records"]["properties"]
        assert columns.keys() == records[0].keys()
        together = ask(records)
        with ThreadPoolExecutor(12) as threads:
            alone = [
                answer for found in threads.map(ask, [[r] for r in records]) for answer in found
            ]
        batches = client.get("/metrics").text
    for found in (together, alone):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            # Padding changes the order of sums, and so the last digits.
            assert ours == pytest.approx(theirs, abs=1e-6)
    count = next(
        float(line.split()[1])
        for line in batches.splitlines()
        if line.startswith("serve_batch_records_count")
    )
    # Requests that waited were predicted together.
    assert count < 1 + len(records)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM


def test_sigterm_answers_what_has_arrived_and_takes_no_more(table, serve):
    model, records = table
    address, process = serve(model)
    port = int(address.rpartition(":")[2])
    body = json.dumps({"records": records[:2]}).encode()
    head = (
        f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=300) as begun:
        begun.sendall(head + body[:10])
        # Its head has been read once another connection has its answer.
        httpx.get(f"{address}/health", timeout=300).raise_for_status()
        process.send_signal(signal.SIGTERM)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=300).close()
            except ConnectionRefusedError:
                break
        begun.sendall(body[10:])
        answer = b"".join(iter(lambda: begun.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["predictions"]) == 2
    assert process.wait(300) == 128 + signal.SIGTERM
    assert "Traceback" not in process.stderr.read()


def test_slow_and_half_open_connections_leave_it_reachable(table, serve):
    model, records = table
    address, process = serve(model, "--timeout", "30")
    port = int(address.rpartition(":")[2])
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    held = []
    try:
        slow = socket.create_connection(("127.0.0.1", port), timeout=300)
        held.append(slow)
        slow.sendall(head + b'Content-Length: 100\r\n\r\n{"rec')
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
        for begun in (b"", head, head + b"Content-Length: 9\r\n\r\n", b"?\r\n\r\n") * 100:
            client = socket.create_connection(("127.0.0.1", port), timeout=300)
            client.sendall(begun)
            held.append(client)
        for _ in range(3):
            answer = httpx.post(f"{address}/predict", json={"records": records[:1]}, timeout=300)
            assert answer.status_code == 200
        huge = head + b"Content-Length: 99999999999999999999\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", port), timeout=300)
        held.append(client)
        client.sendall(huge)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
    finally:
        for client in held:
            client.close()
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "STEADYTRAIN_SERVE_TOKEN is not set"),
        (["--cors-origin", "*"], "--cors-origin *"),
        (["--column", "nonsense"], "--column nonsense"),
    ],
)
def test_bad_options_fail_before_the_model_is_loaded(options, named):
    done = subprocess.run(
        [*COMMAND, "serve", "no-such-model", *options],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "STEADYTRAIN_SERVE_TOKEN"},
    )
    assert done.returncode == 2
    assert named in done.stderr
