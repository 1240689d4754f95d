"""Failures that this machine can produce: each function fails and raises a real exception."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from support.ports import free_port
from support.training import write_tokenizer

SOON = timedelta(milliseconds=300)


def default_cpu_allocator():
    torch.empty(10**15)


def numpy_memory():
    np.empty(10**15)


def python_memory():
    bytearray(2**62)


class Dying(Dataset):
    """A dataset whose row kills the worker that loads it."""

    def __init__(self, with_signal):
        self.with_signal = with_signal

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), self.with_signal)


def worker_killed():
    next(iter(DataLoader(Dying(signal.SIGKILL), num_workers=1)))


def worker_without_shared_memory():
    next(iter(DataLoader(Dying(signal.SIGBUS), num_workers=1)))


def gloo_pair():
    """Return two members of a gloo group in this process."""
    store, members = dist.HashStore(), {}

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        members[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    threads = [threading.Thread(target=join, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members


def gloo_times_out():
    members = gloo_pair()
    options = dist.AllreduceOptions()
    options.timeout = SOON
    members[0].allreduce([torch.ones(1)], options).wait()


def c10d_key_never_comes():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.wait(["nobody sets this"], SOON)


def c10d_others_never_come():
    dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=10))


def c10d_nobody_listens():
    dist.TCPStore("127.0.0.1", free_port(), 2, is_master=False, timeout=timedelta(seconds=1))


def connection_refused():
    socket.create_connection(("127.0.0.1", free_port()))


def connection_reset():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        # Close without lingering, which sends a reset instead of an orderly close.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        client.recv(1)


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"x")
    finally:
        os.close(writer)


def no_such_host():
    socket.getaddrinfo("no-such-host.invalid", 443)


def disk_full():
    with Path("/dev/full").open("wb", buffering=0) as handle:
        handle.write(b"x")


def s3_slow_down():
    import boto3
    from botocore.config import Config

    with http.server.HTTPServer(("127.0.0.1", 0), SlowDown) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.server_port}",
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
            config=Config(retries={"max_attempts": 0}),
        )
        try:
            client.list_objects_v2(Bucket="bucket")
        finally:
            server.shutdown()


class SlowDown(http.server.BaseHTTPRequestHandler):
    """S3's answer to too many requests."""

    def do_GET(self):
        body = b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def torn_archive():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save(torch.ones(1000), path)
        path.write_bytes(path.read_bytes()[:2000])
        torch.load(path)


def torn_safetensors():
    from safetensors.torch import load

    load(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!")


def gradient_not_a_number():
    with torch.autograd.set_detect_anomaly(True):
        weight = torch.zeros(1, requires_grad=True)
        (torch.sqrt(weight) * 0).backward()


def floating_point():
    with np.errstate(all="raise"):
        np.float64(1) / np.float64(0)


def token_beyond_the_embedding():
    torch.nn.Embedding(4, 2)(torch.tensor([9]))


def class_beyond_the_logits():
    torch.nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([7]))


def not_arrow():
    pa.ipc.open_file(pa.py_buffer(b"no arrow file at all"))


def not_text():
    b"\xff".decode()


def word_the_tokenizer_lacks():
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        AutoTokenizer.from_pretrained(folder).get_vocab()["no such word"]


def shapes_that_do_not_fit():
    torch.ones(4, 32) @ torch.ones(64, 16)


def capture(fault: Callable[[], object]) -> Exception:
    """Return the exception that a fault raises."""
    try:
        fault()
    except Exception as error:
        return error
    raise AssertionError(f"{fault.__name__} did not fail")
