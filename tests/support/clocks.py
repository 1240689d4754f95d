"""A clock that a test sets while the program runs, like NTP, a resumed machine, or another node.

A library in front of the C library shifts what a process reads as the wall clock. Its monotonic
clock stays right, as it does on a real machine whose clock is set. Waits until a time of the wall
clock, which torch and Arrow use for every timeout, end when that clock shows it: the kernel, which
does not know of the shift, gets the true time.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

VARIABLE = "FAKE_CLOCK"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *ahead; /* seconds, shared with whoever sets the clock */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAKE_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) ahead = map;
    close(file);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    int failed = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return failed;
}
time_t time(time_t *out) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (out) *out = fine.tv_sec;
    return fine.tv_sec;
}
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait) wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec shifted = *until;
    /* A condition may use the monotonic clock, which is below this for 30 years after boot. */
    if (ahead && until->tv_sec > 1000000000) shifted.tv_sec -= *ahead;
    return wait(condition, mutex, &shifted);
}
"""


class Clock:
    """The wall clock of the programs that start with its environment.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self._library = folder / "clock", folder / "clock.so"
        self.set(0)
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(self._library)]
        subprocess.run(command, input=_SOURCE.encode(), check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_PRELOAD": str(self._library), VARIABLE: str(self.file)}

    def set(self, ahead: int) -> None:
        """Set the clock to `ahead` seconds after the true time, at once and in every program."""
        set_clock(self.file, ahead)


def set_clock(file: Path, ahead: int) -> None:
    """Do the same from one of the programs, whose environment names the file (VARIABLE)."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(descriptor, struct.pack("l", ahead), 0)
    os.close(descriptor)


@pytest.fixture
def clock(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to build the clock with")
    return Clock(tmp_path_factory.mktemp("clock"))
