"""What the installed torch, gloo, NCCL and CUDA say when a rank, a node or a device is lost.

Each text was found in the file named beside it, as `strings` prints it. A long test looks it up in
the installed files, so that a new version that says something else is noticed.
"""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

import pytest

from steadytrain.components.train.attempt import names_of
from steadytrain.components.train.failures import classify

from support.reported import reported

CPU, CUDA = "torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so"
NCCL = "nvidia/nccl/lib/libnccl.so.2"
RUNTIME = "nvidia/cu13/lib/libcudart.so.13"
C10D = "torch/distributed/distributed_c10d.py"
RENDEZVOUS = "torch/distributed/elastic/rendezvous/"
NETWORK, LATE, NODE = "network", "collective_timeout", "node_lost"

# Columns: file, a text in it, exception class, the message as a rank reports it, failure class.
TEXTS = [
    # The store.
    (
        CPU,
        "Failed to recv, got 0 bytes. Connection was likely closed.",
        "DistNetworkError",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
        "or crash?",
        NETWORK,
    ),
    (
        CPU,
        "Failed to send, sent 0 bytes. Connection was likely closed.",
        "DistNetworkError",
        "Failed to send, sent 0 bytes. Connection was likely closed. Did the remote server "
        "shutdown or crash?",
        NETWORK,
    ),
    (CPU, "sendBytes failed on ", "RuntimeError", "sendBytes failed on 10.0.0.1: x", NETWORK),
    (CPU, "recvValue failed on ", "RuntimeError", "recvValue failed on 10.0.0.1: x", NETWORK),
    (
        CPU,
        "recvValueWithTimeout failed on ",
        "RuntimeError",
        "recvValueWithTimeout failed on 10.0.0.1: x",
        NETWORK,
    ),
    (CPU, "recvVector failed on ", "RuntimeError", "recvVector failed on 10.0.0.1: x", NETWORK),
    (
        CPU,
        "Remote peer closed the connection.",
        "RuntimeError",
        "Remote peer closed the connection.",
        NETWORK,
    ),
    (
        CPU,
        "TCP client failed to connect/validate to host ",
        "DistNetworkError",
        "TCP client failed to connect/validate to host node-0:29500 - timed out (try=9, "
        "timeout=60000ms): x",
        NETWORK,
    ),
    (
        CPU,
        "The client socket has timed out after ",
        "RuntimeError",
        "The client socket has timed out after 60000ms while trying to connect to (node-0, 29500).",
        NETWORK,
    ),
    (
        CPU,
        "The client socket has failed to connect to any network address of ",
        "RuntimeError",
        "The client socket has failed to connect to any network address of (node-0, 29500).",
        NETWORK,
    ),
    (
        CPU,
        "The client socket cannot be initialized to connect to ",
        "RuntimeError",
        "The client socket cannot be initialized to connect to node-0 x.",
        NETWORK,
    ),
    (
        CPU,
        "The server socket has failed to listen on any local network address.",
        "RuntimeError",
        "The server socket has failed to listen on any local network address.",
        NETWORK,
    ),
    (
        CPU,
        "The server socket has failed to bind to ",
        "RuntimeError",
        "The server socket has failed to bind to [::]:29500 x.",
        NETWORK,
    ),
    (
        CPU,
        "The server could not be initialized on any address for port=",
        "RuntimeError",
        "The server could not be initialized on any address for port=29500, family=2",
        NETWORK,
    ),
    (CPU, "Failed to accept socket. ", "RuntimeError", "Failed to accept socket. x", NETWORK),
    (
        CPU,
        "Timed out after {} seconds waiting for clients.",
        "RuntimeError",
        "Timed out after 901 seconds waiting for clients. 1/2 clients joined.",
        LATE,
    ),
    (
        CPU,
        "wait timeout after {}ms, keys: ",
        "RuntimeError",
        "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1",
        LATE,
    ),
    (
        CPU,
        "barrier timeout after {}ms, key: ",
        "RuntimeError",
        "barrier timeout after 300000ms, key: x",
        LATE,
    ),
    (CPU, "Timeout waiting for key: ", "RuntimeError", "Timeout waiting for key: x", LATE),
    (CPU, "Socket Timeout", "RuntimeError", "Socket Timeout", LATE),
    (
        CPU,
        "waitForInput: poll for socket {} returned 0, likely a timeout",
        "RuntimeError",
        "waitForInput: poll for socket x returned 0, likely a timeout",
        LATE,
    ),
    (
        CPU,
        "waitForInput: socket {} timed out after {}ms",
        "RuntimeError",
        "waitForInput: socket x timed out after 2000ms",
        LATE,
    ),
    (CPU, "Operation timed out!", "RuntimeError", "Operation timed out!", LATE),
    # gloo.
    (
        CPU,
        "Connection closed by peer ",
        "RuntimeError",
        "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.1]:1",
        NETWORK,
    ),
    (
        CPU,
        "This is typically caused by a remote worker crashing. ",
        "RuntimeError",
        "x. This is typically caused by a remote worker crashing. Check the logs.",
        NETWORK,
    ),
    (
        CPU,
        "This is typically caused by a remote worker hanging or bugs in the application. ",
        "RuntimeError",
        "Read error [10.0.0.1]:1: x. This is typically caused by a remote worker hanging or bugs "
        "in the application. ",
        NETWORK,
    ),
    (CPU, "Socket closed ", "RuntimeError", "Socket closed [10.0.0.1]:1", NETWORK),
    (
        CPU,
        "Socket unexpectedly closed ",
        "RuntimeError",
        "Socket unexpectedly closed [10.0.0.1]:1",
        NETWORK,
    ),
    (CPU, "Pair is not connected (", "RuntimeError", "Pair is not connected (4)", NETWORK),
    (
        CPU,
        "Gloo connectFullMesh failed with ",
        "RuntimeError",
        "Gloo connectFullMesh failed with x",
        NETWORK,
    ),
    (
        CPU,
        "failed to connect, willRetry=",
        "RuntimeError",
        "failed to connect, willRetry=0, retry=3, retryLimit=3",
        NETWORK,
    ),
    (
        CPU,
        "Backing context not fully connected",
        "RuntimeError",
        "Backing context not fully connected",
        NETWORK,
    ),
    (
        CPU,
        "ms for recv operation to complete",
        "RuntimeError",
        "Timed out waiting 1800000ms for recv operation to complete",
        LATE,
    ),
    (
        CPU,
        "ms for send operation to complete",
        "RuntimeError",
        "Timed out waiting 1800000ms for send operation to complete",
        LATE,
    ),
    (
        CPU,
        "Application timeout caused pair closure",
        "RuntimeError",
        "Application timeout caused pair closure",
        LATE,
    ),
    (CPU, "Connect timeout ", "RuntimeError", "Connect timeout [10.0.0.1]:1", LATE),
    (CPU, "Read timeout ", "RuntimeError", "Read timeout [10.0.0.1]:1", LATE),
    (CPU, "Write timeout ", "RuntimeError", "Write timeout [10.0.0.1]:1", LATE),
    (
        CPU,
        " timed out in monitoredBarrier after ",
        "RuntimeError",
        "Rank 1 timed out in monitoredBarrier after 2000 ms.",
        LATE,
    ),
    (
        CPU,
        " failed to pass monitoredBarrier in ",
        "RuntimeError",
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        LATE,
    ),
    # torch around NCCL.
    (
        CUDA,
        "NCCL communicator was aborted on rank ",
        "RuntimeError",
        "NCCL communicator was aborted on rank 1.",
        NETWORK,
    ),
    (
        CUDA,
        "NCCL communicator encountered error set by ProcessGroupNCCL: ",
        "RuntimeError",
        "NCCL communicator encountered error set by ProcessGroupNCCL: x",
        NETWORK,
    ),
    (
        CUDA,
        "ncclInternalError: Internal check failed.",
        "RuntimeError",
        "ncclInternalError: Internal check failed.",
        NETWORK,
    ),
    (
        CUDA,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        "RuntimeError",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error.",
        NETWORK,
    ),
    (
        CUDA,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process",
        "RuntimeError",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.",
        NETWORK,
    ),
    (
        CUDA,
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "DistBackendError",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        NODE,
    ),
    (
        CUDA,
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "DistBackendError",
        "NCCL error in: x.cpp:9, ncclInvalidUsage: This usually reflects invalid usage of NCCL "
        "library.",
        "unknown",
    ),
    (CUDA, "NCCL timeout in: ", "RuntimeError", "NCCL timeout in: x.cpp:9", LATE),
    (
        CUDA,
        "NCCL timeout when waiting for nonblocking call to become successful.",
        "RuntimeError",
        "NCCL timeout when waiting for nonblocking call to become successful.",
        LATE,
    ),
    (
        CUDA,
        "Watchdog caught collective operation timeout: ",
        "RuntimeError",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
        LATE,
    ),
    (
        CUDA,
        "Some NCCL operations have failed or timed out.",
        "RuntimeError",
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature",
        LATE,
    ),
    (
        CUDA,
        "collective timeout or exception",
        "RuntimeError",
        "collective timeout or exception",
        LATE,
    ),
    (
        CUDA,
        "ProcessGroupNCCL's watchdog got stuck for ",
        "RuntimeError",
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds",
        LATE,
    ),
    (
        CUDA,
        "Process group watchdog thread terminated with exception: ",
        "RuntimeError",
        "[Rank 1] Process group watchdog thread terminated with exception: x",
        NETWORK,
    ),
    (
        CUDA,
        " remote error detected from rank: ",
        "RuntimeError",
        "[Rank 1] remote error detected from rank: 0",
        NETWORK,
    ),
    (
        CUDA,
        "Failed to initialize NCCL communicator",
        "RuntimeError",
        "Failed to initialize NCCL communicator: x",
        NETWORK,
    ),
    (
        CUDA,
        "NCCL communicator was aborted after a previous error",
        "RuntimeError",
        "NCCL communicator was aborted after a previous error",
        NETWORK,
    ),
    (CUDA, "NCCL AllReduce failed", "RuntimeError", "NCCL AllReduce failed", NETWORK),
    (CUDA, "NCCL ReduceScatter failed", "RuntimeError", "NCCL ReduceScatter failed", NETWORK),
    (CUDA, "NCCL Async Error", "RuntimeError", "NCCL Async Error", NETWORK),
    # NCCL itself.
    (
        NCCL,
        "remote process exited or there was a network error",
        "RuntimeError",
        "remote process exited or there was a network error",
        NETWORK,
    ),
    (
        NCCL,
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        NETWORK,
    ),
    (
        NCCL,
        "internal error - please report this issue to the NCCL developers",
        "RuntimeError",
        "internal error - please report this issue to the NCCL developers",
        NETWORK,
    ),
    (
        NCCL,
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        NODE,
    ),
    (
        NCCL,
        "socketProgress: Connection closed by remote peer ",
        "RuntimeError",
        "socketProgress: Connection closed by remote peer node-1<39424>",
        NETWORK,
    ),
    (
        NCCL,
        "[Service thread] Connection closed by localRank ",
        "RuntimeError",
        "[Service thread] Connection closed by localRank 0",
        NETWORK,
    ),
    (
        NCCL,
        "NET/IB: Got completion from peer ",
        "RuntimeError",
        "NET/IB: Got completion from peer 10.0.0.1 with status=12 opcode=0 len=0 vendor err 129",
        NETWORK,
    ),
    (
        NCCL,
        "NET/IB: The error is fatal (",
        "RuntimeError",
        "NET/IB: The error is fatal (x). Cannot continue.",
        NETWORK,
    ),
    (
        NCCL,
        "ibv_post_send() failed with error ",
        "RuntimeError",
        "ibv_post_send() failed with error x, Bad WR 0",
        NETWORK,
    ),
    (
        NCCL,
        "NET/Socket : socket progress error",
        "RuntimeError",
        "NET/Socket : socket progress error",
        NETWORK,
    ),
    # CUDA: the device is gone.
    *[
        (RUNTIME, text, "AcceleratorError", f"CUDA error: {text}", NODE)
        for text in (
            "uncorrectable ECC error encountered",
            "uncorrectable NVLink error detected during the execution",
            "no CUDA-capable device is detected",
            "CUDA-capable device(s) is/are busy or unavailable",
            "hardware stack error",
            "system not yet initialized",
            "driver shutting down",
            "unspecified launch failure",
            "unknown error",
        )
    ],
    # Elastic's rendezvous.
    (
        f"{RENDEZVOUS}c10d_rendezvous_backend.py",
        "The connection to the C10d store has failed.",
        "RuntimeError",
        "The connection to the C10d store has failed. See inner exception for details.",
        NETWORK,
    ),
    (
        f"{RENDEZVOUS}dynamic_rendezvous.py",
        "raise RendezvousTimeoutError",
        "RendezvousTimeoutError",
        "",
        LATE,
    ),
    (
        f"{RENDEZVOUS}dynamic_rendezvous.py",
        "raise RendezvousClosedError",
        "RendezvousClosedError",
        "",
        NETWORK,
    ),
    (
        f"{RENDEZVOUS}api.py",
        "class RendezvousStateError(RendezvousError)",
        "RendezvousStateError",
        "The state object is corrupt. See inner exception for details.",
        NETWORK,
    ),
    (
        C10D,
        "raise DistStoreError(",
        "DistStoreError",
        "Timed out initializing process group in store based barrier on rank: 1",
        LATE,
    ),
    # errno, as glibc says it.
    *[
        ("", text, "OSError", f"[Errno {number}] {text}", NETWORK)
        for number, text in (
            (107, "Transport endpoint is not connected"),
            (110, "Connection timed out"),
            (103, "Software caused connection abort"),
            (100, "Network is down"),
            (112, "Host is down"),
            (113, "No route to host"),
            (98, "Address already in use"),
            (99, "Cannot assign requested address"),
        )
    ],
]
PACKAGES = Path(importlib.util.find_spec("torch").origin).parents[1]


@pytest.mark.parametrize("row", TEXTS, ids=[row[1][:40] for row in TEXTS])
def test_installed_text_is_classified_and_retried(row):
    _, _, kind, message, expected = row
    failure = classify([reported(kind, message)], {0: 1}, {})
    assert failure.failure_class == expected
    assert failure.failure_class.retryable


@pytest.mark.long
@pytest.mark.parametrize("file", sorted({row[0] for row in TEXTS} - {""}))
def test_texts_are_in_the_installed_files(file):
    path = PACKAGES / file
    if not path.exists():
        pytest.skip(f"{file} is not installed here")
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as found:
        missing = [row[1] for row in TEXTS if row[0] == file and found.find(row[1].encode()) < 0]
    assert not missing


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")
def test_exception_of_torch_distributed_is_classified_by_its_type():
    import torch.distributed as dist
    from torch.distributed.elastic import rendezvous

    kinds = [item for item in vars(dist).values() if is_error(item, dist.DistError)]
    kinds += [
        item for item in vars(rendezvous).values() if is_error(item, rendezvous.RendezvousError)
    ]
    assert len(kinds) > 8
    for kind in kinds:
        name, *bases = names_of(kind("no text that any table knows"))
        error = reported(name, "no text that any table knows")
        for named in (error, error.model_copy(update={"names": tuple(bases)})):
            assert classify([named], {0: 1}, {}).failure_class in (NETWORK, LATE), name


def test_subclass_and_cause_count_too():
    import torch.distributed as dist

    class Renamed(dist.DistNetworkError):
        pass

    try:
        raise ValueError("no batch") from Renamed("gone")
    except ValueError as error:
        name, *more = names_of(error)
    told = reported(name, "no batch").model_copy(update={"names": tuple(more)})
    assert classify([told], {0: 1}, {}).failure_class == NETWORK
    assert classify([reported(name, "no batch")], {0: 1}, {}).failure_class == "unknown"


def is_error(item, base):
    return isinstance(item, type) and issubclass(item, base)
