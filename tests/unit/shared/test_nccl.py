"""What NCCL's log says, and which settings exist."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, files

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.nccl import VARIABLES, summarized, summary_of_logs

SOCKET = """\
node-0:12:12 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>
node-0:12:12 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
node-0:12:30 [0] NCCL INFO NET/IB : No device found.
node-0:12:30 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0> [1]eth1:fe80::1%eth1<0>
node-0:12:30 [0] NCCL INFO Using network Socket
node-0:12:30 [0] NCCL INFO Channel 00/02 :    0   1
node-0:12:30 [0] NCCL INFO Channel 01/02 :    0   1
node-0:12:30 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-0:12:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
n:1:1 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE
an ordinary line
"""
LOCAL = """\
NCCL version 2.27.5+cuda12.9
h:1:1 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.2<0>
h:1:1 [1] NCCL INFO Using network IB
h:1:1 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
h:1:1 [1] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
h:1:1 [1] init.cc:943 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000
h:1:1 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000
"""


def test_summary_has_network_rings_transports_and_interfaces():
    found = summarized(SOCKET.splitlines())
    assert (found.version, found.ranks, found.network, found.rings) == ("2.21.5", 2, "Socket", 2)
    assert found.interfaces[0] == "eth0"
    assert found.transports == {"NET/Socket": 2}
    assert found.warnings == ()
    text = str(found)
    for part in ("NCCL 2.21.5", "2 ranks connected", "2 rings", "NET/Socket x 2", "eth0"):
        assert part in text


def test_summary_has_each_warning_once_and_says_that_nothing_connected():
    found = summarized(LOCAL.splitlines())
    assert found.transports == {"P2P/CUMEM": 1, "SHM/direct": 1}
    assert found.interfaces == ("mlx5_0:1/IB", "mlx5_1:1/IB", "eth0")
    assert len(found.warnings) == 1
    assert "no communicator became ready" in str(found)
    assert "warning: Duplicate GPU detected" in str(found)


def test_log_without_nccl_has_no_summary(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("a step\n")
    assert summary_of_logs([log, tmp_path / "missing"]) is None
    log.write_text(LOCAL)
    assert summary_of_logs([log]).version == "2.27.5"


def test_settings_are_text_and_unknown_ones_are_refused():
    config = load("chat", ["compute.nccl={NCCL_DEBUG: INFO, NCCL_IB_DISABLE: 1}"])
    assert config.compute.nccl == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    assert config.compute.nccl.keys() <= VARIABLES
    assert load("chat").digest() == config.digest()


def test_settings_are_those_that_the_library_reads():
    try:
        (library,) = (file for file in files("nvidia-nccl-cu13") if file.name == "libnccl.so.2")
    except PackageNotFoundError:
        pytest.skip("PyTorch is here without NCCL")
    content = library.read_binary()
    # A search that begins with the letters is ten times as fast as one that looks behind.
    known = {
        match[1]
        for match in re.finditer(rb"(NCCL_[A-Z0-9_]+)\0", content)
        if not re.match(rb"[A-Z0-9_]", content[match.start() - 1 : match.start()])
    }
    assert {name.encode() for name in VARIABLES} <= known


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (["compute.nccl={NCCL_SOKET_IFNAME: eth0}"], "did you mean NCCL_SOCKET_IFNAME?"),
        (["compute.nccl={LD_PRELOAD: x}"], "NCCL has no setting LD_PRELOAD"),
        (["compute.nccl={NCCL_ALGO: Ring}", "compute.device=cpu"], "use gloo"),
        (
            [
                "compute.nccl={NCCL_ALGO: Ring}",
                "compute.pods.env=[{name: NCCL_ALGO, value: Tree}]",
            ],
            "compute.pods.env sets NCCL_ALGO too",
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(fields, part):
    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        load("chat", fields)
