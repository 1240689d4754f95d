"""Every failure becomes one class, and the root cause wins over its echoes."""

from __future__ import annotations

import pytest

from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.recovery.failures import FailureClass, classify

# Texts as PyTorch, NCCL, gloo, the kernel and the libraries write them.
TEXTS = [
    (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 1.12 GiB is free.",
        "gpu_oom",
    ),
    ("RuntimeError", "CUDA error: out of memory", "gpu_oom"),
    ("RuntimeError", "HIP out of memory. Tried to allocate 20.00 MiB", "gpu_oom"),
    (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "gpu_oom",
    ),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
        "gpu_oom",
    ),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: not enough memory: you tried "
        "to allocate 17179869184 bytes.",
        "gpu_oom",
    ),
    ("MemoryError", "", "host_oom"),
    ("OSError", "[Errno 12] Cannot allocate memory", "host_oom"),
    (
        "_ArrayMemoryError",
        "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
        "host_oom",
    ),
    ("RuntimeError", "DataLoader worker (pid 4711) is killed by signal: Killed. ", "host_oom"),
    (
        "RuntimeError",
        "DataLoader worker (pid(s) 12) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "host_oom",
    ),
    (
        "DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
        "collective_timeout",
    ),
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
        "collective_timeout",
    ),
    ("DistStoreError", "Timed out after 301 seconds waiting for clients.", "collective_timeout"),
    (
        "DistNetworkError",
        "The client socket has failed to connect to any network address of (node-0, 29500). "
        "Connection refused",
        "network",
    ),
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[127.0.0.1]:41234",
        "network",
    ),
    ("RuntimeError", "Connection reset by peer", "network"),
    (
        "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited or there was a network "
        "error, NCCL version 2.19.3\nncclRemoteError: A call failed possibly due to a network "
        "error or a remote process exiting prematurely.",
        "network",
    ),
    ("gaierror", "[Errno -3] Temporary failure in name resolution", "network"),
    ("OSError", "[Errno 28] No space left on device", "storage"),
    (
        "StorageError",
        "checkpoint step-00000010 cannot be written to /data: [Errno 30] Read-only file system\n"
        "  remedy: free space or give write permission there",
        "storage",
    ),
    ("OSError", "[Errno 116] Stale file handle: '/mnt/ckpt'", "storage"),
    ("OSError", "[Errno 122] Disk quota exceeded", "storage"),
    (
        "CheckpointDamaged",
        "checkpoint file /c/step-00000010/model.safetensors: has another content\n"
        "  remedy: the checkpoint before it is used",
        "checkpoint_corrupt",
    ),
    (
        "RuntimeError",
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        "checkpoint_corrupt",
    ),
    (
        "SafetensorError",
        "Error while deserializing header: InvalidHeaderDeserialization",
        "checkpoint_corrupt",
    ),
    (
        "Diverged",
        "training diverged at step 7: loss nan, gradient norm nan\n  remedy: lower the rate",
        "divergence",
    ),
    (
        "RuntimeError",
        "Function 'MulBackward0' returned nan values in its 0th output.",
        "divergence",
    ),
    ("IndexError", "index out of range in self", "data"),
    ("IndexError", "Target 7 is out of bounds.", "data"),
    ("ArrowInvalid", "Not an Arrow file", "data"),
    ("DataError", "shard train-0.arrow is missing\n  remedy: run preprocess", "data"),
    (
        "BadInput",
        "model '/m' has no weights\n  remedy: give a folder with model.safetensors",
        "user_bug",
    ),
    ("TypeError", "forward() got an unexpected keyword argument 'labels'", "user_bug"),
    ("KeyError", "'input_ids'", "user_bug"),
    (
        "RuntimeError",
        "mat1 and mat2 shapes cannot be multiplied (4x32 and 64x16)",
        "user_bug",
    ),
]


def reported(kind, message, *, rank=0, time=1.0):
    return RankError(
        rank=rank, time=time, kind=kind, message=message, traceback=f"Traceback of {rank}", step=5
    )


@pytest.mark.parametrize(("kind", "message", "expected"), TEXTS)
def test_what_a_rank_reports(kind, message, expected):
    failure = classify([reported(kind, message)], {0: 1}, {})
    assert failure.failure_class == expected
    assert failure.remedy
    assert "remedy:" not in failure.message


@pytest.mark.parametrize(
    ("status", "log", "expected", "said"),
    [
        (-9, "", "host_oom", "SIGKILL"),
        (137, "", "host_oom", "SIGKILL"),
        (-15, "", "preemption", "SIGTERM"),
        (143, "", "preemption", "SIGTERM"),
        (-11, "loading\n", "unknown", "SIGSEGV: loading"),
        (-6, "terminate called after throwing 'std::bad_alloc'", "host_oom", "SIGABRT"),
        (3, "", "unknown", "exit status 3"),
        (1, "ImportError without its traceback", "unknown", "without its traceback"),
        (
            1,
            'Traceback (most recent call last):\n  File "my_task.py", line 3, in loss\n'
            "    return 1 / 0\nZeroDivisionError: division by zero\n\nshutting down\n",
            "user_bug",
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
def test_how_a_rank_ends_without_a_report(status, log, expected, said):
    failure = classify([], {0: status}, {0: log})
    assert failure.failure_class == expected
    assert said in failure.message


def test_the_root_cause_wins_over_an_earlier_echo():
    errors = [
        reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0, time=1.0),
        reported("OutOfMemoryError", "CUDA out of memory.", rank=1, time=1.2),
    ]
    failure = classify(errors, {0: 1, 1: 1}, {})
    assert (failure.failure_class, failure.rank) == ("gpu_oom", 1)
    assert failure.traceback == "Traceback of 1"


def test_a_killed_rank_wins_over_what_the_others_saw_of_it():
    errors = [reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0)]
    failure = classify(errors, {1: -9, 0: 1}, {})
    assert (failure.failure_class, failure.rank) == ("host_oom", 1)


def test_ranks_that_torchrun_takes_down_are_no_cause():
    failure = classify([], {1: 3, 0: -15, 2: -9}, {1: "the disk is full: No space left on device"})
    assert (failure.failure_class, failure.rank) == ("storage", 1)


def test_of_echoes_alone_the_earliest_counts():
    errors = [
        reported("RuntimeError", "Connection reset by peer", rank=1, time=1.0),
        reported("RuntimeError", "Connection closed by peer", rank=0, time=2.0),
    ]
    assert classify(errors, {1: 1, 0: 1}, {}).rank == 1


def test_nothing_at_all_is_unknown():
    assert classify([], {0: 0}, {}).failure_class == "unknown"


def test_secrets_stay_out():
    secret = "hf_" + "a" * 34
    failure = classify([reported("ValueError", f"token {secret}")], {0: 1}, {})
    assert secret not in failure.message
    failure = classify([], {0: 1}, {0: f"Traceback (most recent call last):\nValueError: {secret}"})
    assert secret not in failure.message + failure.traceback


def test_the_products_own_errors_speak_for_themselves():
    failure = classify([reported("BadInput", "model 'x': none\n  remedy: give one")], {0: 1}, {})
    assert (failure.message, failure.remedy, failure.traceback) == (
        "model 'x': none",
        "give one",
        "",
    )


@pytest.mark.parametrize("kind", FailureClass)
def test_every_class_has_a_remedy(kind):
    assert kind.remedy


def test_a_users_bug_is_not_worth_a_retry():
    assert not FailureClass.USER_BUG.retryable
    assert FailureClass.PREEMPTION.retryable
