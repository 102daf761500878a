from __future__ import annotations

import errno
import resource

import pytest

from shardwise import limits
from shardwise.errors import UserError

FILES = r"a process may have at most 100 open files here\. Raise that, with: ulimit -n 4096"
SPACE = r"at most 2048 KiB of address space here, and needs more\. Raise that, with: ulimit -v unlimited"
THREADS = r"no more processes or threads can be started here\. Raise the limit, with: ulimit -u 4096"
NO_LIMIT = resource.RLIM_INFINITY


def set_limits(
    monkeypatch: pytest.MonkeyPatch, files: tuple[int, int], space: tuple[int, int]
) -> dict[int, tuple[int, int]]:
    there = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_AS: space}
    monkeypatch.setattr(resource, "getrlimit", there.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", there.__setitem__)
    return there


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files", "/proc/self/status"), FILES),
        (RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. epoll_create: Too many open files"), FILES),
        (MemoryError(), SPACE),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), SPACE),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), SPACE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), SPACE),
        (RuntimeError("Resource temporarily unavailable"), SPACE),
        (RuntimeError("can't start new thread"), r"at most 2048 KiB of address space.* ulimit -v unlimited"),
    ],
)
def test_an_error_of_a_limit_is_told_by_the_limit_and_how_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    set_limits(monkeypatch, (100, 100), (2 << 20, 2 << 20))
    with pytest.raises(UserError, match=said):
        raise UserError(str(limits.limit_reached(error)))


def test_without_a_limit_of_address_space_processes_are_what_a_thread_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, (100, 100), (NO_LIMIT, NO_LIMIT))
    with pytest.raises(UserError, match=THREADS):
        raise UserError(str(limits.limit_reached(RuntimeError("can't start new thread"))))


def test_other_errors_keep_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, (100, 100), (NO_LIMIT, NO_LIMIT))
    for error in (
        MemoryError(),
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("shapes differ"),
        ImportError("no name x"),
    ):
        assert limits.limit_reached(error) is None


def test_soft_limits_are_raised_and_hard_ones_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    there = set_limits(monkeypatch, (32, 1 << 20), (1 << 30, NO_LIMIT))
    limits.check_limits(4)
    assert there == {resource.RLIMIT_NOFILE: (4096, 1 << 20), resource.RLIMIT_AS: (NO_LIMIT, NO_LIMIT)}
    there = set_limits(monkeypatch, (32, 200), (NO_LIMIT, NO_LIMIT))
    limits.check_limits(2)
    assert there[resource.RLIMIT_NOFILE] == (200, 200)
    set_limits(monkeypatch, (48, 48), (1 << 30, 1 << 30))
    with pytest.raises(UserError) as refused:
        limits.check_limits(2)
    assert str(refused.value).splitlines() == [
        "workers cannot start: a process may have 48 open files here, and needs up to 80. Raise that, with: "
        "ulimit -n 4096",
        "workers cannot start: a process may have 1048576 KiB of address space here, and PyTorch alone needs "
        "1310720 KiB. Raise that, with: ulimit -v unlimited",
    ]
