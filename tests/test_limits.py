from __future__ import annotations

import errno
import resource
import threading

import pytest

from shardwise import limits
from shardwise.errors import UserError

FILES = r"a process may have at most 100 open files here\. Raise that, with: ulimit -n 4096"
SPACE = r"at most 2048 KiB of address space here, and needs more\. Raise that, with: ulimit -v unlimited"
THREADS = "no more processes or threads can be started here. What limits them: "
CONTAINER = "a container or a scheduler's job may have a limit of its own"
OF_SPACE = "a process may have 2048 KiB of address space (raise it: ulimit -v unlimited)"
OF_PROCESSES = "a user may have 40 processes and threads (raise it: ulimit -u 4096)"
NO_LIMIT = resource.RLIM_INFINITY


def set_limits(
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[int, int],
    space: tuple[int, int],
    processes: tuple[int, int] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
) -> dict[int, tuple[int, int]]:
    there = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_AS: space, resource.RLIMIT_NPROC: processes}
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
    ],
)
def test_an_error_of_a_limit_is_told_by_the_limit_and_how_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    set_limits(monkeypatch, (100, 100), (2 << 20, 2 << 20))
    with pytest.raises(UserError, match=said):
        raise UserError(str(limits.limit_reached(error)))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), RuntimeError("Resource temporarily unavailable")],
)
@pytest.mark.parametrize(
    ("space", "processes", "said"),
    [
        (NO_LIMIT, NO_LIMIT, [CONTAINER]),
        (2 << 20, NO_LIMIT, [OF_SPACE, CONTAINER]),
        (NO_LIMIT, 40, [OF_PROCESSES, CONTAINER]),
        (2 << 20, 40, [OF_SPACE, OF_PROCESSES, CONTAINER]),
        (2 << 20, 90_000, [OF_SPACE, CONTAINER]),
    ],
)
def test_a_thread_that_does_not_start_is_answered_by_the_limits_that_are_set(
    monkeypatch: pytest.MonkeyPatch, error: Exception, space: int, processes: int, said: list[str]
) -> None:
    set_limits(monkeypatch, (100, 100), (space, space), (processes, processes))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert limits.limit_reached(error) == THREADS + "; or ".join(said)


def test_other_errors_keep_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, (100, 100), (NO_LIMIT, NO_LIMIT))
    for error in (
        MemoryError(),
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("shapes differ"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        ImportError("no name x"),
    ):
        assert limits.limit_reached(error) is None


def test_soft_limits_are_raised_and_hard_ones_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    there = set_limits(monkeypatch, (32, 1 << 20), (1 << 30, NO_LIMIT))
    limits.check_limits(4)
    assert there[resource.RLIMIT_NOFILE] == (4096, 1 << 20)
    assert there[resource.RLIMIT_AS] == (NO_LIMIT, NO_LIMIT)
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


@pytest.mark.parametrize(("processes", "allowed"), [((42, 42), False), ((43, 43), True), ((20, 50), True)])
def test_processes_that_a_run_needs_are_counted_with_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch, processes: tuple[int, int], allowed: bool
) -> None:
    monkeypatch.setattr(limits, "_processes_of_user", lambda: 21)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    there = set_limits(monkeypatch, (4096, 4096), (NO_LIMIT, NO_LIMIT), processes)
    if allowed:
        limits.check_limits(2)
        assert there[resource.RLIMIT_NPROC][0] == processes[1]
        return
    with pytest.raises(UserError) as refused:
        limits.check_limits(2)
    assert str(refused.value) == (
        "workers cannot start: a user may have 42 processes and threads here, and needs at least 43 with "
        "those that run already. Raise that, with: ulimit -u 4096"
    )
    monkeypatch.setattr("os.geteuid", lambda: 0)
    limits.check_limits(2)  # root is not limited


def test_threads_of_this_user_are_counted() -> None:
    before, event = limits._processes_of_user(), threading.Event()
    assert before >= threading.active_count()
    threads = [threading.Thread(target=event.wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    assert limits._processes_of_user() >= 51
    event.set()
    for thread in threads:
        thread.join()
