"""What a search leaves, for tests that compare searches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from steadytrain.components.automl.design import SearchDesign
from steadytrain.components.automl.portfolio import Configuration, portfolio
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.tune.history import Trial

from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

_MEASURED = {
    "fit_seconds",
    "usd",
    "latency_p50_ms",
    "latency_p99_ms",
    "peak_memory_mb",
    "memory_mb",
}


def board_of(output: Path) -> dict[str, Any]:
    """Return the board of the only search in a folder of runs."""
    (path,) = output.glob("studies/*/board.json")
    return json.loads(path.read_bytes())


def without_times(board: dict[str, Any]) -> dict[str, Any]:
    """Return what of a board is the same each time."""
    rows = [
        {name: value for name, value in row.items() if name not in _MEASURED}
        for row in board["configurations"]
    ]
    kept = ("best_params", "best_score", "corrected_score", "better_than_default_lightgbm")
    return {"rows": rows, "skipped": board["skipped"]} | {name: board[name] for name in kept}


_EXAMPLE = (
    WITHOUT_STEADYTRAIN
    + """import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
example = model.input_example
print(json.dumps([len(example), len(model.predict(example))]))
"""
)


def answered_example(output: Path, address: str) -> tuple[int, int]:
    """Let a registered model predict from its input example, in a process without steadytrain.

    Returns:
        The records of the example, and the predictions.
    """
    done = subprocess.run(
        [sys.executable, "-c", _EXAMPLE, f"sqlite:///{output / 'mlflow.db'}", address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    given, answers = json.loads(done.stdout.splitlines()[-1])
    return given, answers


def simulated(
    config: RunConfig, loss: Callable[[Configuration], float], after: int
) -> tuple[Sequence[Configuration], SearchDesign]:
    """Let a search suggest and end all its units, one after another.

    Args:
        loss: of a configuration.
        after: how many configurations follow the portfolio.

    Returns:
        The portfolio, and the design after the last unit.
    """
    known, _ = portfolio(config)
    history: Any = SimpleNamespace(
        queued=[item.as_plain() for item in known], trials=[], running={}
    )
    design = SearchDesign(config, history, lambda place: loss(design.configurations[place]))
    for number in range((len(known) + after) * config.cross_validation.splits):
        assert design.ready(number)
        params = design.suggest(number, {}, lambda _: True)
        assert params is not None
        history.trials.append(Trial(number, params, 1, status="finished"))
    return known, design
