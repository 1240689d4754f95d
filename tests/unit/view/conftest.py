"""Output folders with runs, and a client of the pages that show them."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.web_server import LOOPBACK
from steadytrain.pipelines.view.app import application
from steadytrain.pipelines.view.source import open_source

from support.written_run import Writer


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


@pytest.fixture
def make_run(output):
    """Return a function that writes a run which has begun to train."""

    def make(run, **training):
        content = {
            "name": f"name-of-{run}",
            "run": run,
            "output": str(output),
            "data": {"source": ["package:stdlib"], "task": "causal_lm"},
            "model": {"config": {"model_type": "llama"}},
            "training": training,
        }
        writer = Writer(from_mapping(content))
        writer.again()
        writer.start_step("train")
        return writer

    return make


@pytest.fixture
def source(output):
    return open_source(str(output))


@pytest.fixture
def client(source):
    app = application(source, hosts=LOOPBACK)
    return TestClient(app, base_url="http://127.0.0.1:8484", follow_redirects=False)
