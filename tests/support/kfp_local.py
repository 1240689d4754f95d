"""Program that runs a compiled pipeline, unmodified, with kfp.local: PIPELINE PARAMETERS ROOT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kfp import components, local
from kfp.local import subprocess_task_handler

SCRIPT_ENDS = 3
"""Elements of a step's command up to its shell script: `sh -ec SCRIPT SOURCE ARGUMENTS...`."""
with_python = subprocess_task_handler.replace_python_executable


def with_python_in_script(full_command: list[str], new_executable: str) -> list[str]:
    # KFP's own function also changes "python3" in the arguments, as in a path of the data.
    script = with_python(full_command[:SCRIPT_ENDS], new_executable)
    return [*script, *full_command[SCRIPT_ENDS:]]


def main(pipeline: str, parameters: str, root: str) -> None:
    subprocess_task_handler.replace_python_executable = with_python_in_script
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=root,
        # KFP removes it at the end. One in TMPDIR would stay there if this process is killed.
        workspace_root=str(Path(root, "workspace")),
        raise_on_error=True,
    )
    run = components.load_component_from_file(pipeline)
    run(**json.loads(Path(parameters).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(*sys.argv[1:])
