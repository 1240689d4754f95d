"""NCCL: the settings that it reads, and what its log says about a run.

Names are those that NCCL 2.30 reads, of its user guide and beyond. The log is what NCCL_DEBUG=INFO
prints; its lines are not a documented format, so an unknown line is ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

_PREFIX: Final = "NCCL_"
_NAMES: Final = """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_POINTERS COLLNET_ENABLE
COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES
CONF_FILE CONNECT_ROUND_MAX_PEERS CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG
DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN
GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE
GIN_ENABLE GIN_NCONNECTIONS GIN_PLUGIN GIN_TYPE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE
GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE
IB_AR_THRESHOLD IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS
IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ
IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P LAUNCH_MODE
LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS
LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN
MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_RAIL_PER_HOST
MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA
NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL
NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVB_PRECONNECT NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE
NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE
P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL
P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PAT_ENABLE PROFILER_PLUGIN PROTO
PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR
REPORT_CONNECT_PROGRESS RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY
SOCKET_FAMILY SOCKET_IFNAME SOCKET_INLINE SOCKET_MIN_TASKSIZE SOCKET_NTHREADS
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TUNER_PLUGIN UID_STAGGER_RATE
UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO WIN_ENABLE WORK_ARGS_BYTES
WORK_FIFO_BYTES
"""
VARIABLES: Final = frozenset(_PREFIX + name for name in _NAMES.split())
"""The environment variables that NCCL reads."""
_MOST_WARNINGS: Final = 3
_MOST_BYTES: Final = 4 << 20

_LONGEST: Final = 300
_ANY: Final = re.compile(r"NCCL (?:INFO|WARN|version)")
_PATTERNS: Final = {
    "version": re.compile(r"NCCL version ([\d.]+)"),
    "network": re.compile(r"NCCL INFO Using network (\S+)"),
    "interface": re.compile(r"NCCL INFO (?:NET/\w+|Bootstrap) ?: Using (.*)"),
    "ring": re.compile(r"NCCL INFO Channel \d+/(\d+) : (?:\s*\d+)+\s*$"),
    "way": re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : .*-> \d+\[\w+\] (?:\[\w+\] )?via (\S+)"),
    "ready": re.compile(r"NCCL INFO (?:\w+ )?comm \S+ rank \d+ nranks (\d+) .*Init COMPLETE"),
    "warning": re.compile(r"NCCL WARN (.*)"),
}
"""What the lines of interest say, in their first group."""
_CARD: Final = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.]*):[0-9a-fA-F.:]+<\d+>|\[\d+\](\w+:\d+/\w+)")
"""A network card in a line of interfaces: a name with an address, or a port of InfiniBand."""


def unknown_variable(name: str) -> str:
    """Return why a name is no setting of NCCL, with the closest one; "" if it is one."""
    if name in VARIABLES:
        return ""
    close = get_close_matches(name.upper(), sorted(VARIABLES), 1)
    return f"NCCL has no setting {name}" + (f"; did you mean {close[0]}?" if close else "")


@dataclass(frozen=True)
class NcclSummary:
    """What ranks wrote with NCCL_DEBUG=INFO.

    version: of NCCL; "" if it is not in the log. ranks: of the largest communicator that was ready;
        0 if none was. network: Socket, IB or a plug-in.
    interfaces: network cards that are used, in order. rings: channels between all ranks.
    transports: connections by way, such as P2P/CUMEM, SHM, NET/IB or NET/Socket.
    warnings: each once.
    """

    version: str
    ranks: int
    network: str
    interfaces: tuple[str, ...]
    rings: int
    transports: dict[str, int]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Return the summary in one line."""
        ways = ", ".join(f"{way} x {count}" for way, count in self.transports.items())
        parts = [
            f"NCCL {self.version}" if self.version else "NCCL",
            f"{self.ranks} ranks connected" if self.ranks else "no communicator became ready",
            f"network {self.network}" if self.network else "",
            f"interfaces {', '.join(self.interfaces)}" if self.interfaces else "",
            f"{self.rings} rings" if self.rings else "",
            f"transports {ways}" if ways else "",
            *(f"warning: {text}" for text in self.warnings[:_MOST_WARNINGS]),
        ]
        if (more := len(self.warnings) - _MOST_WARNINGS) > 0:
            parts.append(f"{more} more warnings")
        return "; ".join(filter(None, parts))


def summarized(lines: Iterable[str]) -> NcclSummary | None:
    """Return what a log says about NCCL; None if NCCL wrote nothing to it."""
    result: dict[str, list[str]] = {name: [] for name in _PATTERNS}
    seen = False
    for line in lines:
        seen = seen or _ANY.search(line) is not None
        for name, pattern in _PATTERNS.items():
            if match := pattern.search(line):
                result[name].append(match[1].strip())
    if not seen:
        return None
    cards = (pair for text in result["interface"] for pair in _CARD.findall(text))
    ways = Counter("/".join(way.split("/")[:2]) for way in result["way"])
    return NcclSummary(
        version=next(iter(result["version"]), ""),
        ranks=max(map(int, result["ready"]), default=0),
        network=next(iter(result["network"]), ""),
        interfaces=tuple(dict.fromkeys(card or port for card, port in cards)),
        rings=max(map(int, result["ring"]), default=0),
        transports=dict(ways),
        warnings=tuple(dict.fromkeys(text[:_LONGEST] for text in result["warning"])),
    )


def summary_of_logs(paths: Iterable[Path]) -> NcclSummary | None:
    """Return what the logs of ranks say about NCCL, from the last 4 MiB of each; None if nothing.

    A file that cannot be read is left out: whoever reads the run reports it.
    """

    def lines() -> Iterable[str]:
        for path in paths:
            try:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _MOST_BYTES))
                    yield from file.read().decode(errors="replace").splitlines()
            except OSError:
                continue

    return summarized(lines())
