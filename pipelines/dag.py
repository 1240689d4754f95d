"""Program that runs the compiled pipeline on this machine with kfp.local.

It is a separate process, so that the command can show progress next to it: `python -m
steadytrain.pipelines.dag PIPELINE PARAMETERS ROOT [--trains]`. If a signal asks it to stop, or if
its parent dies, it stops the running step and starts no other. The exit handler still writes the
report, as on a cluster.
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
from steadytrain.pipelines.light_kfp import import_kfp
from steadytrain.pipelines.step_processes import StepProcesses

LOCK_VARIABLE = "STEADYTRAIN_RUN_LOCK"
"""Passes the descriptor of the run's lock to this program. Its steps must hold the lock too."""
TRAINS = "--trains"
END_NOW = signal.SIGINT
"""Kills the running step immediately. Every other stop signal gives it its grace period."""

_SCRIPT_ENDS = 3
"""Elements of a step's command up to its shell script: `sh -ec SCRIPT SOURCE ARGUMENTS...`."""


def main(pipeline: str, parameters: str, root: str, *options: str) -> int:
    """Run a compiled pipeline, unmodified.

    Args:
        pipeline: path of the compiled YAML.
        parameters: path of a JSON file with the pipeline's parameters.
        root: folder for KFP's own artifacts, inside the run's folder.
        options: TRAINS if ranks will start, so that what they import is imported early.

    Returns:
        0 if every task succeeded, otherwise 1.
    """
    lock = os.environ.pop(LOCK_VARIABLE, "")
    run = Path(root).absolute().parent
    processes = StepProcesses(
        Workspace(run.parent.parent, run.name),
        also_hold=[int(lock)] if lock else [],
        trains=TRAINS in options,
    )

    def stop(number: int, _: object) -> None:
        processes.end_now() if number == END_NOW else processes.stop()

    with stop_signals(stop):
        held = tether()
        if held is not None:
            held.watch(processes.stop)
        return _execute(processes, pipeline, parameters, root)


def _execute(processes: StepProcesses, pipeline: str, parameters: str, root: str) -> int:
    import_kfp()
    from kfp import components, local
    from kfp.local import subprocess_task_handler

    # kfp's own function cannot stop a step, and does not report how a step was killed.
    assert callable(subprocess_task_handler.run_local_subprocess)
    subprocess_task_handler.run_local_subprocess = processes.run
    with_python = subprocess_task_handler.replace_python_executable

    def with_python_in_script(full_command: list[str], new_executable: str) -> list[str]:
        # kfp's own function also changes "python3" in the arguments, as in a path of the data.
        script = _SCRIPT_ENDS
        return [*with_python(full_command[:script], new_executable), *full_command[script:]]

    subprocess_task_handler.replace_python_executable = with_python_in_script
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        # kfp removes it at the end. One in TMPDIR would stay there if this process is killed.
        workspace_root=str(Path(root, "workspace")),
        raise_on_error=True,
    )
    run = components.load_component_from_file(pipeline)
    try:
        run(**json.loads(Path(parameters).read_text(encoding="utf-8")))
    except RuntimeError as error:  # kfp's error for a failed task; the step has reported why
        print(error, file=sys.stderr)
        return 1
    finally:
        processes.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
