"""The guide's request, its JavaScript and its SQL work, against a service and in Postgres."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pandas as pd
import pytest
import uvicorn

from steadytrain.components.predict.model import Input, ServedModel
from steadytrain.components.predict.service import Limits, application
from steadytrain.components.shared.web_server import listen

from support.snippets import ROOT, blocks

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "guides" / "serve.md"
TOKEN = "c4n4ry-0f-the-guide"


class Doubles:
    def predict(self, frame):
        return pd.DataFrame({"prediction": frame["rooms"] * 2})


def snippets(language):
    return [block.text for block in blocks(language) if block.page == GUIDE]


@pytest.fixture
def address():
    """Return the address of a service that asks for TOKEN."""
    inputs = [Input("rooms", "rooms", "number", True), Input("town", "town", "text", False)]
    model = ServedModel("models:/m/1", inputs, None, Doubles())
    config = uvicorn.Config(application(model, Limits(), token=TOKEN), log_level="error")
    server, listener = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_function_for_pages_gets_predictions_and_reports_why_there_are_none(address):
    if shutil.which("node") is None:
        pytest.skip("needs node")
    (code,) = snippets("js")
    asked = [([{"rooms": 1}], TOKEN), ([{"rooms": "x", "town": ""}], TOKEN), ([{"rooms": 1}], "")]
    asked[0][0][0]["town"] = None
    calls = "".join(
        f"await predict({json.dumps(address)}, {json.dumps(records)}, {json.dumps(token)})"
        ".then(JSON.stringify, String).then(console.log);\n"
        for records, token in asked
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code + calls],
        capture_output=True,
        text=True,
        check=True,
    )
    good, bad, unknown = done.stdout.splitlines()
    assert json.loads(good) == [{"prediction": 2}]
    assert "rooms is 'x', not a number; fix or leave out" in bad
    assert "the token is missing or wrong; send the header" in unknown


def test_documented_request_is_answered(address):
    (line,) = snippets("sh")
    program, _, url, _, header, _, body = shlex.split(line.replace("\\\n", " "))[:7]
    path = url.removeprefix("http://127.0.0.1:8485")
    right = dict([header.split(": ")], authorization=f"Bearer {TOKEN}")
    answer = httpx.post(address + path, content=body, headers=right, timeout=300)
    assert (program, answer.status_code) == ("curl", 200)
    assert answer.json()["predictions"] == [{"prediction": 6}, {"prediction": 10}]


@contextmanager
def postgres(folder):
    """Yield a psql command for a new server on a socket in a folder."""
    if not all(map(shutil.which, ("initdb", "postgres", "psql"))):
        pytest.skip("needs a Postgres server")
    # Postgres does not run as root.
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    folder.chmod(0o777)
    data = folder / "data"
    subprocess.run(
        ["initdb", "-A", "trust", "-U", "me", "-D", data], check=True, capture_output=True, **user
    )
    command = ["postgres", "-D", data, "-c", "listen_addresses=", "-k", folder]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **user) as server:
        for line in server.stderr:
            if "ready to accept connections" in line:
                break
        yield ["psql", "-h", folder, "-U", "me", "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-qtA"]
        server.terminate()
        server.communicate()


def test_statement_stores_each_record_with_its_answer():
    table, insert = snippets("sql")
    # The path of a socket has at most 107 bytes, and nobody may enter pytest's own folder.

    with tempfile.TemporaryDirectory() as name, postgres(Path(name)) as psql:

        def run(sql, **variables):
            given = [item for key, value in variables.items() for item in ("-v", f"{key}={value}")]
            return subprocess.run(
                [*psql, *given], input=sql, capture_output=True, text=True, check=True
            ).stdout

        run(table)
        hostile = "Robert'); DROP TABLE predictions;--"
        request = json.dumps({"records": [{"x": n, "name": hostile} for n in (3, 1, 2)]})
        answer = json.dumps(
            {"model": "models:/m/1", "predictions": [{"prediction": n * 2} for n in (3, 1, 2)]}
        )
        run(insert, request=request, answer=answer)
        found = run("SELECT model, record, answer FROM predictions ORDER BY id")
    rows = [line.split("|") for line in found.splitlines()]
    assert [(model, json.loads(record), json.loads(answer)) for model, record, answer in rows] == [
        ("models:/m/1", {"x": n, "name": hostile}, {"prediction": n * 2}) for n in (3, 1, 2)
    ]
