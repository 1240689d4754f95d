"""Every failure is assigned one class, and the root cause wins over its echoes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from steadytrain.components.shared.errors import BadInput, DataError, PathTaken, StorageError
from steadytrain.components.train.attempt import AttemptFolder, RankError
from steadytrain.components.train.checkpoint import CheckpointDamaged
from steadytrain.components.train.failures import (
    CannotRecompute,
    CompiledCodeDamaged,
    Diverged,
    FailureClass,
    classify,
)

from support import captured
from support.reported import reported

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
    (captured.word_the_tokenizer_lacks, "unknown", "traceback"),
    (captured.shapes_that_do_not_fit, "unknown", "traceback"),
]

# steadytrain's own errors, which include a fix.
OWN = [
    (StorageError("it cannot be written", remedy="do this"), "storage"),
    (PathTaken("a folder is in its place", remedy="do this"), "user_bug"),
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
FINAL = {"data", "user_bug"}


def told_by(error):
    return classify([RankError.of(error)], {0: 1}, {})


def judge(failure, expected, remedy):
    assert failure.failure_class == expected
    assert failure.failure_class.retryable == (expected not in FINAL)
    assert remedy in failure.remedy


@pytest.mark.parametrize(
    ("kind", "message", "expected", "remedy", "issue"),
    CITED,
    ids=[row[-1] for row in CITED],
)
def test_reported_errors_are_classified(kind, message, expected, remedy, issue):
    judge(classify([reported(kind, message)], {0: 1}, {}), expected, remedy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "expected", "remedy"), CAPTURED, ids=[row[0].__name__ for row in CAPTURED]
)
def test_local_errors_are_classified(fault, expected, remedy):
    judge(told_by(captured.capture(fault)), expected, remedy)


@pytest.mark.parametrize(("error", "expected"), OWN, ids=[row[1] for row in OWN])
def test_product_errors_are_classified(error, expected):
    failure = told_by(error)
    judge(failure, expected, error.remedy)
    assert "fix:" not in failure.message


def test_secrets_are_redacted():
    secret = "hf_" + "a" * 34
    failure = classify([reported("ValueError", f"token {secret}")], {0: 1}, {})
    assert secret not in failure.message
    failure = classify([], {0: 1}, {0: f"Traceback (most recent call last):\nValueError: {secret}"})
    assert secret not in failure.message + failure.traceback


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (ValueError("the file b\udcff.txt is empty"), "unknown", "the file b\\udcff.txt is empty"),
        (ValueError("\x1b[31mred\0"), "unknown", "ValueError: red"),
        (OSError(28, "No space left on device", "b\udcff"), "storage", "No space left"),
        (Unspeakable(), "unknown", "Unspeakable: its text is unknown"),
        (
            ExceptionGroup("two", [ValueError("row 3"), OSError(28, "No space left on device")]),
            "storage",
            "two (2 sub-exceptions): ValueError: row 3; OSError: [Errno 28] No space left",
        ),
        (ExceptionGroup("deep", [ExceptionGroup("in", [MemoryError()])]), "host_oom", "deep"),
        (ValueError("first " + "x" * 10**6 + " last"), "unknown", "980,011 characters left out"),
    ],
    ids=["surrogate", "control", "storage", "no text", "group", "nested", "long"],
)
def test_whatever_user_code_raises_is_reported(tmp_path, error, expected, text):
    RankError.of(error, 0, step=5).save(tmp_path / "rank-0.error.json")
    (found,) = AttemptFolder(tmp_path).errors()
    failure = classify([found], {0: 1}, {})
    assert failure.failure_class == expected
    assert text in failure.message
    assert len(failure.message) + len(failure.traceback) < 50_000
    assert failure.failed_step == 5


def test_product_errors_keep_their_message():
    failure = told_by(BadInput("model 'x': none", remedy="give one"))
    assert (failure.message, failure.remedy, failure.traceback) == (
        "model 'x': none",
        "give one",
        "",
    )


@pytest.mark.parametrize("kind", FailureClass)
def test_every_class_has_a_remedy(kind):
    assert kind.remedy


def test_user_bug_is_not_retried():
    assert not FailureClass.USER_BUG.retryable
    assert FailureClass.PREEMPTION.retryable
