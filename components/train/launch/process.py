"""An agent as a process on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.train.agent.processes import MARK, end_processes, unreaped
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.agent import AgentAttempt

RANK_PROGRAM = (sys.executable, "-m", "steadytrain.components.train.loop.main")
_AGENT = "steadytrain.components.train.agent"


class ProcessLauncher:
    """Starts an agent for the ranks of this machine.

    Args:
        program: command of a rank; the attempt's folder is added to it.
    """

    def __init__(self, compute: ComputeConfig, program: Sequence[str] = RANK_PROGRAM) -> None:
        self.compute, self.program = compute, tuple(program)

    @property
    def world_size(self) -> int:
        return self.compute.nproc_per_node

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[AgentAttempt]:
        node = folder.node(0)
        node.path.mkdir(parents=True, exist_ok=True)
        with node.log.open("ab") as log:
            # A session of its own: Ctrl-C on the terminal reaches the supervisor alone.
            process = subprocess.Popen(
                self._command(folder),
                env={**os.environ, MARK: str(folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield AgentAttempt(folder, gone=lambda _: process.poll() is not None)
        finally:
            end_processes(folder.path, root=unreaped(process))
            process.wait()

    def _command(self, folder: AttemptFolder) -> list[str]:
        threads = self.compute.threads_per_rank
        # Stated, since this process may be on a node of something else itself.
        options = [f"--ranks={self.world_size}", "--nodes=1", "--node=0"]
        if threads:
            options.append(f"--threads={threads}")
        return [sys.executable, "-m", _AGENT, *options, str(folder.path), *self.program]
