"""Of several failures, the root cause wins; a rank without a report is judged by its log."""

from __future__ import annotations

import signal

import pytest

from steadytrain.components.train.failures import classify

from support.reported import reported

# What a library logs about an exception that it has handled.
HANDLED = (
    "WARNING:apex: the slow path is taken\nTraceback (most recent call last):\n"
    '  File "fast.py", line 3, in <module>\n    import fused\n\n'
    "ModuleNotFoundError: No module named 'fused'\n"
)


HANDLED_MEMORY = (
    'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
    "torch.OutOfMemoryError: CUDA out of memory.\n"
)


FULL_DISK = (
    'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
    "OSError: [Errno 28] No space left on device\n"
)


# The way torch.distributed prints an uncaught exception.
PREFIXED = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "a.py", line 3, in <module>\n[rank1]:     read()\n'
    "[rank1]: DataError: a shard is missing\n"
)


WATCHDOG = (
    "[rank1]:[E1122 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600013 milliseconds\n"
)


@pytest.mark.parametrize(
    ("status", "log", "expected", "said"),
    [
        (-9, "", "host_oom", "SIGKILL"),
        (137, "", "host_oom", "SIGKILL"),
        (-15, "", "preemption", "SIGTERM"),
        (143, "", "preemption", "SIGTERM"),
        (-11, "loading\n", "crash", "SIGSEGV: loading"),
        *[(-number, "", "crash", signal.Signals(number).name) for number in (4, 6, 7, 8, 11)],
        (139, "", "crash", "SIGSEGV"),
        (134, "terminate called after throwing 'std::bad_alloc'", "host_oom", "SIGABRT"),
        (-11, f"{HANDLED}step 30\n", "crash", "SIGSEGV: step 30"),
        (-11, HANDLED, "crash", "SIGSEGV"),
        (-11, HANDLED_MEMORY, "gpu_oom", "SIGSEGV"),
        (-11, f"{HANDLED_MEMORY}trying a smaller one\n", "crash", "trying a smaller one"),
        (-9, HANDLED, "host_oom", "SIGKILL"),
        (-15, HANDLED, "preemption", "SIGTERM"),
        (-6, f"{HANDLED}{WATCHDOG}", "collective_timeout", "SIGABRT"),
        (-6, f"{WATCHDOG}{HANDLED}", "collective_timeout", "SIGABRT"),
        (-6, f"{HANDLED}what():  std::bad_alloc\n", "host_oom", "std::bad_alloc"),
        (1, f"{HANDLED}CUDA out of memory. Tried to allocate 2 GiB\n", "gpu_oom", "allocate 2"),
        (1, f"{HANDLED}NCCL error: unhandled system error\n", "network", "NCCL error"),
        (1, f"{FULL_DISK}sendBytes failed: Broken pipe\n", "storage", "No space left"),
        (3, f"{HANDLED}giving up\n", "unknown", "exit status 3: giving up"),
        (1, PREFIXED, "data", "DataError: a shard is missing"),
        (-6, "terminate called after throwing 'std::bad_alloc'", "host_oom", "SIGABRT"),
        (3, "", "unknown", "exit status 3"),
        (-40, "", "unknown", "signal 40"),
        (1, "ImportError without its traceback", "unknown", "without its traceback"),
        (
            1,
            'Traceback (most recent call last):\n  File "my_task.py", line 3, in loss\n'
            "    return 1 / 0\nZeroDivisionError: division by zero\n\nshutting down\n",
            "unknown",
            "ZeroDivisionError: division by zero",
        ),
        (
            1,
            'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n'
            "OSError: [Errno 28] No space left on device",
            "storage",
            "No space left",
        ),
    ],
)
def test_silent_exits_are_classified(status, log, expected, said):
    failure = classify([], {0: status}, {0: log})
    assert failure.failure_class == expected
    assert said in failure.message


def test_crash_outranks_its_echoes():
    errors = [reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0)]
    failure = classify(errors, {1: -11, 0: 1}, {}, {1: 57})
    assert (failure.failure_class, failure.rank, failure.failed_step) == ("crash", 1, 57)
    assert "after step 57" in failure.message
    assert failure.failure_class.retryable


def test_root_cause_outranks_an_earlier_echo():
    errors = [
        reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0, time=1.0),
        reported("OutOfMemoryError", "CUDA out of memory.", rank=1, time=1.2),
    ]
    failure = classify(errors, {0: 1, 1: 1}, {})
    assert (failure.failure_class, failure.rank) == ("gpu_oom", 1)
    assert failure.traceback == "Traceback of 1"


def test_killed_rank_outranks_its_echoes():
    errors = [reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0)]
    failure = classify(errors, {1: -9, 0: 1}, {})
    assert (failure.failure_class, failure.rank) == ("host_oom", 1)


def test_kill_that_the_agent_explains_is_no_longer_unexplained():
    echo = reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0, time=1.0)
    told = reported("OOMKilled", "the kernel killed it", rank=1, time=9.0)
    failure = classify([echo, told], {1: -9, 0: 1}, {})
    assert (failure.failure_class, failure.rank, failure.unexplained) == ("host_oom", 1, False)
    assert classify([], {1: -9}, {}).unexplained


def test_ranks_stopped_by_the_agent_are_not_the_cause():
    failure = classify([], {1: 3, 0: -15, 2: -9}, {1: "the disk is full: No space left on device"})
    assert (failure.failure_class, failure.rank) == ("storage", 1)


def test_rank_killed_for_outliving_another_is_not_the_cause():
    """Rank 1 loses the network. Rank 0 waits for it until our agent kills rank 0."""
    told = reported("DistNetworkError", "The client socket has timed out after 60000ms", rank=1)
    failure = classify([told], {1: 1, 0: -9}, {})
    assert (failure.failure_class, failure.rank) == ("network", 1)
    assert classify([told], {0: -9, 1: 1}, {}).failure_class == "host_oom"


def test_earliest_echo_counts_without_a_cause():
    errors = [
        reported("RuntimeError", "Connection reset by peer", rank=1, time=1.0),
        reported("RuntimeError", "Connection closed by peer", rank=0, time=2.0),
    ]
    assert classify(errors, {1: 1, 0: 1}, {}).rank == 1


GONE = ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.")
UNEXPLAINED = ("RuntimeError", "something that no table knows")


@pytest.mark.parametrize("survivor", [GONE, UNEXPLAINED, ("CUDAError", "illegal memory access")])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Preempted", "preemption"),
        ("Evicted", "preemption"),
        ("NodeLost", "node_lost"),
        ("OOMKilled", "host_oom"),
    ],
)
@pytest.mark.parametrize("first", ["the cluster", "the survivor"])
def test_what_the_cluster_states_outranks_the_survivors(survivor, kind, expected, first):
    later = 2.0 if first == "the survivor" else 0.5
    errors = [reported(*survivor, rank=1), reported(kind, "pod x is gone", rank=0, time=later)]
    failure = classify(sorted(errors, key=lambda error: error.time), {1: 1}, {})
    assert (failure.failure_class, failure.rank) == (expected, 0)


def test_deleted_pod_outranks_a_lost_connection_but_not_an_earlier_exception():
    """A controller deletes the other pods of a job in which one has failed."""
    deleted = reported("PodDeleted", "pod x was deleted", rank=0, time=3.0)
    assert classify([reported(*GONE, rank=1), deleted], {1: 1}, {}).failure_class == "preemption"
    failure = classify([reported(*UNEXPLAINED, rank=1), deleted], {1: 1}, {})
    assert (failure.failure_class, failure.rank) == ("unknown", 1)
    bug = reported("BadInput", "no data", rank=1)
    assert classify([bug, deleted], {1: 1}, {}).failure_class == "user_bug"


def test_agent_that_does_not_stop_in_time_is_not_the_cause():
    late = reported("AgentLost", "the agent did not stop the ranks when asked to", time=30.0)
    bad = reported("DataError", "a shard is missing", rank=1)
    assert classify([bad, late], {1: 1}, {}).failure_class == "data"
    assert classify([reported(*GONE, rank=1), late], {1: 1}, {}).failure_class == "node_lost"


def test_unexplained_exception_outranks_the_lost_connections_that_follow_it():
    errors = [reported(*GONE, rank=0), reported(*UNEXPLAINED, rank=1, time=2.0)]
    failure = classify(errors, {0: 1, 1: 1}, {})
    assert (failure.failure_class, failure.rank) == ("unknown", 1)


def test_own_sigterm_of_a_survivor_is_an_echo():
    lost = reported("NodeLost", "pod x is on a node that is lost", rank=0, time=9.0)
    failure = classify([lost], {1: -15}, {})
    assert (failure.failure_class, failure.rank) == ("node_lost", 0)
    crashed = classify([reported(*UNEXPLAINED, rank=0)], {1: 143}, {})
    assert (crashed.failure_class, crashed.rank) == ("unknown", 0)


def test_no_evidence_is_unknown():
    assert classify([], {0: 0}, {}).failure_class == "unknown"
