"""A run whose every process was killed still says what it has saved."""

from __future__ import annotations

import signal

import pytest

from steadytrain.components.shared.errors import Stopped
from steadytrain.pipelines import light_kfp, local
from steadytrain.pipelines.cli import app


def test_third_signal_leaves_nothing_behind(make_run, monkeypatch, capfd):
    run = make_run()
    run.attempt(1, last=170, max_steps=400, outcome="stopped")
    run.workspace.config.write_text(run.config.to_yaml())

    def killed(*_, **__):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(light_kfp, "import_kfp", lambda: None)
    monkeypatch.setattr(local, "run_locally", killed)
    arguments = ["resume", "tiny", "-o", str(run.workspace.output)]
    with pytest.raises(Stopped) as stopped:
        app(arguments, standalone_mode=False)
    assert stopped.value.code == 130
    told = capfd.readouterr().err.splitlines()
    assert told[-2:] == [
        "saved   the checkpoint of step 100 of 400",
        f"next    steadytrain resume tiny --output {run.workspace.output}",
    ]
