"""The program that executes the compiled DAG on this machine, by kfp.local.

It is a process of its own, so that the command beside it stays free to show
progress: `python -m steadytrain.pipelines.dag PIPELINE PARAMETERS ROOT`. On
SIGTERM, or when its parent dies, the step at work is stopped, and the exit
handler still writes the report, as on a cluster.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from steadytrain.components.shared.parent import die_with_parent

_EXECUTOR = "kfp.dsl.executor_main"
_EXIT_HANDLER = "report"


def main(pipeline: str, parameters: str, root: str) -> int:
    """Runs a compiled pipeline, unmodified.

    Args:
        pipeline: path of the compiled YAML.
        parameters: path of a JSON file with the pipeline's parameters.
        root: folder for KFP's own artifacts.

    Returns:
        0 where every task succeeded, else 1.
    """
    signal.signal(signal.SIGTERM, _begin_to_stop)
    die_with_parent(signal.SIGTERM)

    from kfp import components, local

    local.init(
        runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True
    )
    run = components.load_component_from_file(pipeline)
    try:
        run(**json.loads(Path(parameters).read_text(encoding="utf-8")))
    except RuntimeError as error:  # kfp's word for a failed task; the step told why
        print(error, file=sys.stderr)
        return 1
    return 0


def _begin_to_stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_stop_steps, daemon=True).start()


def _stop_steps() -> None:
    """Stops every step from now on, each once, but for the exit handler."""
    told: set[int] = set()
    while True:
        for process in psutil.Process().children(recursive=True):
            if process.pid not in told and _is_step(process):
                told.add(process.pid)
                process.terminate()
        time.sleep(0.2)


def _is_step(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    # The shell around the executor has the executor's name in one long argument.
    return _EXECUTOR in command and _EXIT_HANDLER not in command


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
