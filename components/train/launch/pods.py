"""Attempts in the pods of a cluster: one agent per pod, one pod per node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from steadytrain.components.shared.cluster import Cluster, Refused, Unreachable
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.environment import TRACEPARENT
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.hardware import CPU
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.launch.agent import AgentAttempt, AgentExit
from steadytrain.components.train.launch.follow import JobFollower
from steadytrain.components.train.launch.job import SLACK_SECONDS, Job
from steadytrain.components.train.launch.naming import attempt_labels, job_name
from steadytrain.components.train.launch.own_pod import own_pod
from steadytrain.components.train.launch.process import RANK_PROGRAM
from steadytrain.components.train.launch.removal import nodes_of_pods, remove_jobs

_AGENT = "steadytrain.components.train.agent"
_GPU_LABEL = "nvidia.com/gpu.product"


class PodsLauncher:
    """Starts each attempt as a separate job.

    Args:
        job: the kind of job.
        program: command of a rank; the attempt's folder is appended to it.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        job: type[Job],
        program: Sequence[str] = RANK_PROGRAM,
    ) -> None:
        self.config, self.cluster, self.job = config, cluster, job
        self.program = tuple(program)
        self.own = own_pod(cluster)
        self._avoided: list[str] = []
        self._check()

    @property
    def world_size(self) -> int:
        return self.config.compute.world_size

    @property
    def device(self) -> str:
        """The GPU's name. For a remote GPU, the node selector's label is the best source."""
        compute = self.config.compute
        if not compute.gpus_of_a_node:
            return CPU
        pods = compute.pods
        chosen = pods.node_selector | pods.spot.node_selector
        return chosen.get(_GPU_LABEL, pods.gpu_resource)

    @property
    def host_memory(self) -> int:
        """The memory limit of a pod."""
        from kubernetes.utils import parse_quantity

        return int(parse_quantity(self.config.compute.pods.memory))

    @contextlib.contextmanager
    def start(self, folder: AttemptFolder) -> Iterator[JobAttempt]:
        stream = Workspace.of(self.config).stream("launcher")
        job = self._job(folder)
        follower = JobFollower(
            self.cluster,
            job,
            folder,
            notify=stream.emit,
            note=stream.emit,
        )
        follower.start()
        attempt = JobAttempt(folder, follower)
        try:
            yield attempt
            if any(attempt.exits().values()) or not attempt.exits():
                # The cluster may know better than the ranks why they were asked to exit. One thread
                # looks at a time, or both would note the same pods.
                follower.end()
                with contextlib.suppress(Unreachable, Refused):
                    follower.look()
        finally:
            # It may be about to create the job, which would then outlive the removal.
            follower.end()
            if left := self._remove(folder):
                print(left, file=sys.stderr)
                stream.emit(Warned(stage="train", message=left))
            attempt.relay_log()
            stream.close()

    def _remove(self, folder: AttemptFolder) -> str:
        """End running agents at once, then delete the job and everything it owns.

        Returns:
            What could not be removed, in words. Its processes may still hold their devices, so
            later attempts avoid its nodes.
        """
        with contextlib.suppress(StorageError):
            LocalStorage(folder.path).write(folder.leave.name, b"0")
        seconds = self.config.recovery.stop_grace_seconds + 2 * SLACK_SECONDS
        try:
            left = remove_jobs(
                self.cluster,
                self.config.run_id,
                folder.path.parent,
                self.job.kinds,
                seconds=seconds,
            )
            run = self.config.run_id, folder.path.parent
            self._avoided = nodes_of_pods(self.cluster, *run) if left else []
        except (Unreachable, Refused) as error:
            left = [str(error)]
        if not left:
            return ""
        # Its agents end with the lease; the exit handler or the next attempt removes it.
        text = f"not removed within {duration(seconds)}: {', '.join(left)}"
        nodes = ", ".join(self._avoided)
        return f"{text}; later attempts avoid {nodes}" if nodes else text

    def _job(self, folder: AttemptFolder) -> Job:
        spec, compute = AttemptSpec.load(folder.spec), self.config.compute
        limits = [compute.pods.pending_timeout_seconds, spec.pending_seconds]
        pending = min(item for item in limits if item is not None)
        pods = compute.pods.model_copy(update={"pending_timeout_seconds": pending})
        return self.job(
            name=job_name(spec.run_id, spec.attempt),
            folder=str(folder.path),
            labels=attempt_labels(spec) | self.own.labels,
            command=agent_command(self.config.compute, folder.path, self.program),
            compute=compute.model_copy(update={"nodes": spec.nodes, "pods": pods}),
            recovery=self.config.recovery,
            own=self.own,
            on_demand=spec.on_demand,
            avoided=self._avoided,
            variables={TRACEPARENT: spec.traceparent} if spec.traceparent else {},
        )

    def _check(self) -> None:
        """Reject what could otherwise fail only after machines are allocated."""
        pods, output = self.config.compute.pods, Workspace.of(self.config).output
        if not (pods.image or self.own.image):
            raise BadInput(
                "compute.pods.image is missing, and this process does not run in a pod whose "
                "image it could use",
                remedy="set compute.pods.image, or run the train step as a step of a pipeline",
            )
        mounts = (
            [volume.path for volume in pods.volumes]
            if pods.volumes is not None
            else [mount["mountPath"] for mount in self.own.mounts]
        )
        if not any(output.is_relative_to(Path(mount)) for mount in mounts):
            raise BadInput(
                f"output = {str(output)!r} is not on a volume that the training pods share "
                f"({', '.join(mounts) or 'there is none'})",
                remedy="set output to a folder on a mounted claim, or set compute.pods.volumes",
            )


def agent_command(
    compute: ComputeConfig,
    folder: Path,
    program: Sequence[str] = RANK_PROGRAM,
    *,
    python: str = sys.executable,
) -> list[str]:
    """Return the command that each pod of an attempt runs.

    Args:
        folder: of the attempt.
        program: command of a rank; the folder is appended to it.
    """
    # A pod sees all cores of its node, but shares them with other pods.
    share = int(compute.pods.cores) // compute.nproc_per_node
    threads = compute.threads_per_rank or max(1, share)
    options = [f"--ranks={compute.nproc_per_node}", f"--threads={threads}"]
    return [python, "-m", _AGENT, *options, str(folder), *program]


class JobAttempt(AgentAttempt):
    """The ranks of an attempt in pods; rank 0's log is copied to this process's output."""

    def __init__(self, folder: AttemptFolder, follower: JobFollower) -> None:
        super().__init__(
            folder,
            gone=self._gone,
            started=lambda node: node in follower.started,
            pending_seconds=follower.job.pods.pending_timeout_seconds,
            nodes=follower.job.compute.nodes,
        )
        self.follower = follower
        self._asked = False
        self._log_offset = 0

    def poll(self) -> bool:
        self.relay_log()
        return super().poll()

    def stop(self, grace_seconds: float) -> None:
        self._asked = True
        super().stop(grace_seconds)

    def relay_log(self) -> None:
        """Print what rank 0 has written since the last call."""
        with contextlib.suppress(FileNotFoundError), self.folder.log(0).open("rb") as handle:
            handle.seek(self._log_offset)
            new = handle.read()
            self._log_offset += len(new)
            if new:
                sys.stdout.write(new.decode("utf-8", "replace"))
                sys.stdout.flush()

    def _gone(self, node: int) -> AgentExit | None:
        """Return how a node's agent ended. After a stop request, one that never started counts."""
        never = self._asked and node not in self.follower.started
        if node in self.follower.succeeded:
            return AgentExit(0)
        return AgentExit() if never or node in self.follower.gone else None
