"""The doctor's check of what ranks exchange: it starts them, and says which one is in the way.

Every rank says which stage it enters. When the time is over, the ranks that are behind the others
are those that the others wait for. On a cluster, each pod runs this module for its own ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from steadytrain.components.shared.nccl import summarized
from steadytrain.components.shared.quantities import size
from steadytrain.components.train.agent.processes import reserved_port

STAGES: Final = ("started", "joining", "latency", "bandwidth", "finished")
"""What a rank enters, in order."""
RANK: Final = (sys.executable, "-m", "steadytrain.components.train.loop.collective_probe")
_POLL_SECONDS: Final = 0.1
_START_SECONDS: Final = 120.0
"""The least that the ranks may take to import PyTorch, which takes long on a busy machine."""
_GRACE_SECONDS: Final = 5.0
_ENDED: Final = "ended"
_WAITS: Final = {
    "": "has not started",
    "started": "has started and does not join",
    "joining": "joins the others",
    "latency": "is in the first all-reduce",
    "bandwidth": "is in the large all-reduce",
}


@dataclass(frozen=True)
class Checked:
    """The result of the check.

    good: whether every rank finished.
    remedy: what to do; "" if it is good.
    """

    text: str
    good: bool
    remedy: str = ""


def run_here(
    ranks: int,
    seconds: float,
    *,
    variables: Mapping[str, str],
    program: Sequence[str] = RANK,
    nodes: int = 1,
    node: int = 0,
    meeting: tuple[str, int] | None = None,
) -> Iterator[str]:
    """Start this node's ranks, and yield the lines of their output as they come.

    So many seconds after the first rank has started, those that are left are killed. At the end,
    a line for each rank says how it ended.

    Args:
        variables: added to the environment of each rank, such as settings of NCCL.
        program: command of a rank; `seconds` is appended to it.
        meeting: address and port of rank 0; None means a free port of this machine.
    """
    debug = os.environ.get("NCCL_DEBUG", "INFO")
    common = {"NCCL_DEBUG": debug, **variables}
    common |= {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with contextlib.ExitStack() as stack:
        address, port = meeting or stack.enter_context(reserved_port())
        common |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        paths = [Path(folder, f"rank-{local}.log") for local in range(ranks)]
        started = [
            _start((*program, str(seconds)), path, common, node * ranks + local, local)
            for local, path in enumerate(paths)
        ]
        outputs = [stack.enter_context(path.open("rb")) for path in paths]
        try:
            yield from _follow(started, outputs, seconds)
        finally:
            # None for those that the check itself ends.
            statuses = [process.poll() for process in started]
            for process in started:
                process.kill()
                process.wait()
        for local, (output, status) in enumerate(zip(outputs, statuses, strict=True)):
            yield from output.read().decode(errors="replace").splitlines()
            yield json.dumps({"rank": node * ranks + local, "stage": _ENDED, "status": status})


def _start(
    command: Sequence[str], path: Path, common: Mapping[str, str], rank: int, local: int
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(local)}
    with path.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )


def _follow(
    started: Sequence[subprocess.Popen[bytes]], outputs: Sequence[BinaryIO], seconds: float
) -> Iterator[str]:
    """Yield lines until all ranks have ended or their time is over, which begins with a stage."""
    deadline = time.monotonic() + max(_START_SECONDS, seconds)
    begun, died, starting = False, False, set(range(len(started)))
    while time.monotonic() < deadline and any(rank.poll() is None for rank in started):
        for number, output in enumerate(outputs):
            lines = list(_complete_lines(output))
            stages = {content["stage"] for content in _stages(lines)}
            if stages and not begun:
                deadline, begun = time.monotonic() + seconds, True
            if stages - {STAGES[0]}:
                starting.discard(number)
            yield from lines
        starting -= {number for number in starting if started[number].poll() is not None}
        if not died and not starting and any(rank.poll() not in (None, 0) for rank in started):
            # The others have joined, and wait for it in vain.
            deadline, died = min(deadline, time.monotonic() + _GRACE_SECONDS), True
        time.sleep(_POLL_SECONDS)


def _complete_lines(output: BinaryIO) -> Iterator[str]:
    """Yield the lines that a rank has finished since the last call."""
    position = output.tell()
    while (line := output.readline()).endswith(b"\n"):
        position = output.tell()
        yield line.decode(errors="replace").removesuffix("\n")
    output.seek(position)


def judged(lines: Iterable[str], ranks: int, seconds: float) -> Checked:
    """Return what the output of all ranks means.

    The bandwidth of the bus is that of nccl-tests' PERFORMANCE.md: an all-reduce moves
    2 (n - 1) / n times its bytes over each of n ranks' links.
    """
    lines = list(lines)
    reached: dict[int, dict[str, Any]] = {rank: {"stage": ""} for rank in range(ranks)}
    ends: dict[int, int | None] = {}
    for content in _stages(lines):
        rank, stage = content["rank"], content["stage"]
        if stage == _ENDED:
            ends[rank] = content["status"]
        elif rank in reached:
            reached[rank] = {**reached[rank], **content}
    order = {rank: ("", *STAGES).index(about["stage"]) for rank, about in reached.items()}
    least = min(order.values())
    if least == len(STAGES):
        return Checked(_speed(reached[0], ranks), good=True)
    behind = [rank for rank, position in order.items() if position == least]
    named = "; ".join(
        f"{_name(rank, reached[rank])} {_state(rank, reached, ends)}" for rank in behind
    )
    if len(behind) == ranks:
        text = f"within {seconds:g} s, no rank got further: {named}"
        remedy = "check the network interface (NCCL_SOCKET_IFNAME in compute.nccl) and firewalls"
    else:
        others = ", ".join(str(rank) for rank in order if rank not in behind)
        text = f"within {seconds:g} s, {named}; the others ({others}) wait for it"
        remedy = "look at that process and its device; leave its node out if it happens again"
    if (nccl := summarized(lines)) is not None:
        text = f"{text}. {nccl}"
    elif last_words := _last_words(lines):
        text = f"{text}. Its output ends with: {last_words}"
    return Checked(text, good=False, remedy=remedy)


def _stages(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith('{"rank"'):
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                continue  # A rank was killed within the line.
            if content.get("stage") in (*STAGES, _ENDED):
                yield content


def _last_words(lines: Sequence[str]) -> str:
    printed = [line.strip() for line in lines if line.strip() and not line.startswith('{"rank"')]
    return printed[-1][:300] if printed else ""


def _name(rank: int, about: Mapping[str, Any]) -> str:
    return f"rank {rank} on {about['host']}" if "host" in about else f"rank {rank}"


def _state(
    rank: int, reached: Mapping[int, Mapping[str, Any]], ends: Mapping[int, int | None]
) -> str:
    """Return what a rank does, or how it ended."""
    waits, status = _WAITS[reached[rank]["stage"]], ends.get(rank)
    return waits if status is None else f"{waits} (ended with status {status})"


def _speed(first: Mapping[str, Any], ranks: int) -> str:
    moved = 2 * (ranks - 1) / ranks * first["bytes"] / first["seconds"]
    return (
        f"{ranks} ranks by {first['backend']}: an all-reduce of 8 bytes takes "
        f"{first['latency'] * 1e6:,.0f} us, one of {size(first['bytes'])} moves "
        f"{size(moved)} a second over each rank's link"
    )


def main() -> None:
    """Run the ranks of a pod, and print their output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given, environment = parser.parse_args(), os.environ
    lines = run_here(
        given.ranks,
        given.seconds,
        variables={},
        nodes=given.nodes,
        node=int(environment.get("PET_NODE_RANK", "0")),
        meeting=(environment["PET_MASTER_ADDR"], int(environment["PET_MASTER_PORT"]))
        if given.nodes > 1
        else None,
    )
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
