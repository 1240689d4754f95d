"""Every failure is assigned one class, and the root cause wins over its echoes."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.checkpoint import CheckpointDamaged
from steadytrain.components.train.errors import CannotRecompute, CompiledCodeDamaged, Diverged
from steadytrain.components.train.failures import FailureClass, classify

from support import captured

# Messages that no fault on this machine produces, as quoted in GitHub issues.
# Columns: exception class, message, failure class, a word of the fix, issue.
CITED = [
    (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0; 15.90 GiB total capacity; "
        "14.25 GiB already allocated; 981.56 MiB free; 1.59 MiB cached)",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/pytorch/pytorch/issues/18853",
    ),
    (
        "RuntimeError",
        "CUDA error: out of memory",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/MIC-DKFZ/nnUNet/issues/593",
    ),
    (
        "OutOfMemoryError",
        "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB "
        "of which 15.09 GiB is free.",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/ROCm/TheRock/issues/1054",
    ),
    (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/QwenLM/Qwen3/issues/873",
    ),
    (
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/karpathy/llama2.c/issues/279",
    ),
    (
        "RuntimeError",
        "GET was unable to find an engine to execute this computation; cuDNN error: "
        "CUDNN_STATUS_ALLOC_FAILED",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/QwenLM/Qwen3-VL/issues/151",
    ),
    (
        "DistBackendError",
        "include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/NVIDIA/nccl/issues/1235",
    ),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 10737418240 bytes. Error code 12 (Cannot allocate memory)",
        "gpu_oom",
        "micro_batch_size",
        "https://github.com/deepspeedai/DeepSpeed/issues/3860",
    ),
    (
        "RuntimeError",
        "DataLoader worker (pid 1817) is killed by signal: Killed. ",
        "host_oom",
        "fewer workers",
        "https://github.com/pytorch/pytorch/issues/8976",
    ),
    (
        "RuntimeError",
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "host_oom",
        "/dev/shm",
        "https://github.com/pytorch/pytorch/issues/108861",
    ),
    (
        "DistBackendError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds "
        "before timing out.",
        "collective_timeout",
        "slow or missing",
        "https://github.com/NVIDIA/Megatron-LM/issues/1207",
    ),
    (
        "RuntimeError",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete",
        "collective_timeout",
        "slow or missing",
        "https://github.com/meta-pytorch/torchtune/issues/2676",
    ),
    (
        "DistStoreError",
        "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
        "collective_timeout",
        "slow or missing",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1040",
    ),
    (
        "DistNetworkError",
        "The client socket has timed out after 300000ms while trying to connect to "
        "(036c56dce41b, 41331).",
        "network",
        "network",
        "https://github.com/nvidia-cosmos/cosmos-rl/issues/681",
    ),
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[127.0.0.1]:38032",
        "network",
        "network",
        "https://github.com/hkust-nlp/simpleRL-reason/issues/17",
    ),
    (
        "DistBackendError",
        "NCCL error in: /opt/pytorch/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3763,"
        " remote process exited or there was a network error, NCCL version 2.28.8\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.",
        "network",
        "network",
        "https://github.com/NVIDIA/nccl/issues/1928",
    ),
    (
        "RuntimeError",
        "NCCL error in: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1191, unhandled system "
        "error, NCCL version 2.10.3\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.",
        "network",
        "network",
        "https://github.com/NVIDIA/nccl/issues/875",
    ),
    (
        "RuntimeError",
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call",
        "node_lost",
        "ECC",
        "https://github.com/zai-org/ChatGLM3/issues/681",
    ),
    (
        "RuntimeError",
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously "
        "reported at some other API call",
        "data",
        "data card",
        "https://github.com/modelscope/ms-swift/issues/3267",
    ),
    (
        "Exception",
        "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "divergence",
        "learning_rate",
        "https://github.com/deepspeedai/DeepSpeedExamples/issues/418",
    ),
    (
        "ClientError",
        "An error occurred (SlowDown) when calling the CompleteMultipartUpload operation",
        "storage",
        "space",
        "https://github.com/ray-project/deltacat/issues/51",
    ),
    (
        "OSError",
        "[Errno 116] Stale file handle: '/mnt/checkpoints'",
        "storage",
        "space",
        "https://github.com/hiyouga/LlamaFactory/issues/3243",
    ),
]

# Faults that this machine can produce. The tests classify the exceptions they raise.
CAPTURED = [
    (captured.default_cpu_allocator, "gpu_oom", "micro_batch_size"),
    (captured.numpy_memory, "host_oom", "more memory"),
    (captured.python_memory, "host_oom", "more memory"),
    (captured.worker_killed, "host_oom", "fewer workers"),
    (captured.worker_without_shared_memory, "host_oom", "/dev/shm"),
    (captured.gloo_times_out, "collective_timeout", "slow or missing"),
    (captured.c10d_key_never_comes, "collective_timeout", "slow or missing"),
    (captured.c10d_others_never_come, "collective_timeout", "slow or missing"),
    (captured.c10d_nobody_listens, "network", "host names"),
    (captured.connection_refused, "network", "network"),
    (captured.connection_reset, "network", "network"),
    (captured.broken_pipe, "network", "network"),
    (captured.no_such_host, "network", "host names"),
    (captured.disk_full, "storage", "free space"),
    (captured.s3_slow_down, "storage", "grant access"),
    (captured.torn_archive, "checkpoint_corrupt", "remove the checkpoint"),
    (captured.torn_safetensors, "checkpoint_corrupt", "remove the checkpoint"),
    (captured.gradient_not_a_number, "divergence", "learning_rate"),
    (captured.floating_point, "divergence", "learning_rate"),
    (captured.token_beyond_the_embedding, "data", "data card"),
    (captured.class_beyond_the_logits, "data", "data card"),
    (captured.not_arrow, "data", "data card"),
    (captured.not_text, "data", "data card"),
    (captured.word_the_tokenizer_lacks, "user_bug", "traceback"),
    (captured.shapes_that_do_not_fit, "user_bug", "traceback"),
]

# steadytrain's own errors, which include a fix.
OWN = [
    (StorageError("it cannot be written", remedy="do this"), "storage"),
    (
        CheckpointDamaged("a file has its content has changed", remedy="do this"),
        "checkpoint_corrupt",
    ),
    (Diverged(7, math.nan, math.nan), "divergence"),
    (CannotRecompute("no activation checkpointing", remedy="do this"), "gpu_oom"),
    (DataError("a shard is missing", remedy="do this"), "data"),
    (BadInput("the model has no weights", remedy="do this"), "user_bug"),
    (CompiledCodeDamaged(Path("compiled"), ImportError("file too short")), "storage"),
]
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
FINAL = {"data", "user_bug", "unknown"}


def reported(kind, message, *, rank=0, time=1.0):
    return RankError(
        rank=rank, time=time, kind=kind, message=message, traceback=f"Traceback of {rank}", step=5
    )


def told_by(error):
    return classify([reported(type(error).__name__, str(error))], {0: 1}, {})


def judge(failure, expected, remedy):
    assert failure.failure_class == expected
    assert failure.failure_class.retryable == (expected not in FINAL)
    assert remedy in failure.remedy


@pytest.mark.parametrize(
    ("kind", "message", "expected", "remedy", "issue"),
    CITED,
    ids=[row[-1] for row in CITED],
)
def test_what_others_have_reported(kind, message, expected, remedy, issue):
    judge(classify([reported(kind, message)], {0: 1}, {}), expected, remedy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "expected", "remedy"), CAPTURED, ids=[row[0].__name__ for row in CAPTURED]
)
def test_what_fails_here(fault, expected, remedy):
    judge(told_by(captured.capture(fault)), expected, remedy)


@pytest.mark.parametrize(("error", "expected"), OWN, ids=[row[1] for row in OWN])
def test_what_the_product_raises(error, expected):
    failure = told_by(error)
    judge(failure, expected, error.remedy)
    assert "remedy:" not in failure.message


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


def test_a_crash_wins_over_what_the_others_saw_of_it():
    errors = [reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0)]
    failure = classify(errors, {1: -11, 0: 1}, {}, {1: 57})
    assert (failure.failure_class, failure.rank, failure.step) == ("crash", 1, 57)
    assert "after step 57" in failure.message
    assert failure.failure_class.retryable


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


def test_a_kill_that_the_agent_explains_is_no_longer_unexplained():
    echo = reported("RuntimeError", "Connection closed by peer [127.0.0.1]:1", rank=0, time=1.0)
    told = reported("OOMKilled", "the kernel killed it", rank=1, time=9.0)
    failure = classify([echo, told], {1: -9, 0: 1}, {})
    assert (failure.failure_class, failure.rank, failure.unexplained) == ("host_oom", 1, False)
    assert classify([], {1: -9}, {}).unexplained


def test_ranks_that_torchrun_takes_down_are_no_cause():
    failure = classify([], {1: 3, 0: -15, 2: -9}, {1: "the disk is full: No space left on device"})
    assert (failure.failure_class, failure.rank) == ("storage", 1)


def test_a_rank_that_was_killed_for_outliving_another_is_no_cause():
    """Rank 1 loses the network. Rank 0 waits for it until our agent kills rank 0."""
    told = reported("DistNetworkError", "The client socket has timed out after 60000ms", rank=1)
    failure = classify([told], {1: 1, 0: -9}, {})
    assert (failure.failure_class, failure.rank) == ("network", 1)
    assert classify([told], {0: -9, 1: 1}, {}).failure_class == "host_oom"


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
