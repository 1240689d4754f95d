"""The program that executes the compiled DAG on this machine, by kfp.local.

It is a process of its own, so that the command beside it stays free to show
progress: `python -m steadytrain.pipelines.dag PIPELINE PARAMETERS ROOT`. Asked to stop, by a
signal or because its parent is gone, it ends the step at work and starts no other; the exit
handler still writes the report, as on a cluster.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from steadytrain.components.shared.lifeline import tether
from steadytrain.components.shared.stopping import stop_signals
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.step_processes import StepProcesses

LOCK_VARIABLE = "STEADYTRAIN_RUN_LOCK"
"""Tells this program the descriptor of the run's lock, which its steps are to hold too."""
END_NOW = signal.SIGINT
"""Ends the step at work without grace; all other stop signals leave it its grace."""


def main(pipeline: str, parameters: str, root: str) -> int:
    """Runs a compiled pipeline, unmodified.

    Args:
        pipeline: path of the compiled YAML.
        parameters: path of a JSON file with the pipeline's parameters.
        root: folder for KFP's own artifacts, in the folder of the run.

    Returns:
        0 where every task succeeded, else 1.
    """
    lock = os.environ.pop(LOCK_VARIABLE, "")
    run = Path(root).absolute().parent
    processes = StepProcesses(
        Workspace(run.parent.parent, run.name), also_hold=[int(lock)] if lock else []
    )

    def stop(number: int, _: object) -> None:
        processes.end_now() if number == END_NOW else processes.stop()

    with stop_signals(stop):
        held = tether()
        if held is not None:
            held.watch(processes.stop)
        return _execute(processes, pipeline, parameters, root)


def _execute(processes: StepProcesses, pipeline: str, parameters: str, root: str) -> int:
    from kfp import components, local
    from kfp.local import subprocess_task_handler

    # kfp's own knows neither a stop nor how a step was killed.
    assert callable(subprocess_task_handler.run_local_subprocess)
    subprocess_task_handler.run_local_subprocess = processes.run
    local.init(
        runner=local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True
    )
    run = components.load_component_from_file(pipeline)
    try:
        run(**json.loads(Path(parameters).read_text(encoding="utf-8")))
    except RuntimeError as error:  # kfp's word for a failed task; the step told why
        print(error, file=sys.stderr)
        return 1
    finally:
        processes.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
