"""Commands forked from a process that has torch imported already, where a subprocess of Python would import
it for seconds.

The server (this file, run as a program) has imported what commands and their workers need, and has no
threads. For each call it forks a keeper, and the keeper forks the command: in a session of its own, with the
folder, environment, arguments and outputs that were asked for and with signals as a new process has them, it
calls what the `shardwise` script calls. What a command starts with `python -c` (the server that its workers
are forked from, multiprocessing's resource tracker) or `env … python -m MODULE` (the runs of a drill) is
forked from the command in the same way, so it is warm too.

Commands see no GPU: their workers are forked, which is not possible after CUDA was used. So they train the
same numbers on every machine. Tests of commands on a GPU start them as a user does
(`shardwise_of_a_user`).

The keeper adopts whatever the command leaves behind. It gives that a moment to end, then tells of it and ends
it: no test may leave a process running.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
PRELOAD = (
    "typer", "rich.progress", "shardwise.cli.app", "shardwise.train.run", "shardwise.train.launch",
    "shardwise.proof.compare_layout",
    "shardwise.proof.trace_modules", "shardwise.proof.prove", "shardwise.proof.drill",
    "shardwise.probe.measure_cluster",
    "shardwise.search.forecast", "shardwise.probe.quick_probe", "torch.distributed.pipelining.schedules",
    "shardwise.parallel.pipeline",
)  # fmt: skip
LEFT_SECONDS = 10.0
"""How long what a command started may take to end after it."""
LONGEST = 240.0
"""Seconds that a command may take: a little less than a test may."""
PR_SET_CHILD_SUBREAPER = 36
_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]


class Command:
    """A command that runs, as subprocess.Popen shows one."""

    def __init__(self, connection: socket.socket, outputs: list[Path]) -> None:
        self._messages, self._outputs = connection.makefile("r"), outputs
        self._connection = connection
        self.pid = int(self._read())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(0.001)
            try:
                if self._connection.recv(1, socket.MSG_PEEK):
                    self.wait()
            except TimeoutError:
                pass
        return self.returncode

    def wait(self, timeout: float = LONGEST) -> int:
        if self.returncode is None:
            self.returncode = int(self._read(timeout))
        return self.returncode

    def communicate(self, timeout: float = LONGEST) -> tuple[str, str]:
        """Wait for its end; what it wrote. Nothing of it may be left running."""
        self.wait(timeout)
        left = json.loads(self._read(LEFT_SECONDS + 60))
        self._connection.close()
        assert not left, f"processes left behind: {left}"
        return self._outputs[0].read_text(), self._outputs[1].read_text()

    def _read(self, timeout: float = 60) -> str:
        self._connection.settimeout(timeout)
        try:
            return self._messages.readline()
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(f"command {self.pid}", timeout) from None


class Server:
    """The warm process, started once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-warm-")
        self._calls = 0
        self._address = f"{self._folder.name}/socket"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address], env=environment, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def start(self, *arguments: str, cwd: Path, environment: Mapping[str, str]) -> Command:
        """Start `shardwise ARGUMENTS` in a folder."""
        self._calls += 1
        paths = [Path(self._folder.name) / f"{self._calls}.{name}" for name in ("out", "err")]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment}
        request = json.dumps([arguments, str(cwd), variables]).encode()
        connection.sendall(len(request).to_bytes(4, "big"))
        with paths[0].open("w") as output, paths[1].open("w") as errors:
            socket.send_fds(connection, [b"-"], [output.fileno(), errors.fileno()])
        connection.sendall(request)
        return Command(connection, paths)

    def run(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """The same, and wait for its end."""
        command = self.start(*arguments, cwd=cwd, environment=environment)
        output, errors = command.communicate()
        return subprocess.CompletedProcess(list(arguments), command.wait(), output, errors)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


# -- inside the server ---------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a keeper for every call, for as long as the tests last."""
    import importlib

    for module in PRELOAD:
        importlib.import_module(module)
    warnings.filterwarnings(
        "ignore", message=".* is multi-threaded, use of fork", category=DeprecationWarning
    )
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP):  # it ends with the tests, which may be run by nohup
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        listener.settimeout(1.0)
        print("ready", flush=True)
        while os.getppid() == parent:
            bury()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                keep(connection)
            connection.close()


def bury() -> None:
    """Wait for the keepers that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def keep(connection: socket.socket) -> None:
    """Start the command, wait for its end, and see that nothing of it is left. The command itself returns
    from here."""
    connection.settimeout(60)
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    arguments, cwd, environment = json.loads(connection.recv(size, socket.MSG_WAITALL))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(arguments, cwd, environment, outputs)
    connection.sendall(f"{pid}\n".encode())
    command, ready = os.pidfd_open(pid), []
    while not ready:
        bury_adopted(pid)
        ready, _, _ = select.select([command, connection], [], [], 0.02)
    if command not in ready:  # nobody sends here: the tests are gone
        os.killpg(pid, signal.SIGKILL)
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    connection.sendall(f"{json.dumps(left_behind())}\n".encode())
    os._exit(0)


def bury_adopted(command: int) -> None:
    """Wait, as init would, for those that have ended after their parent; the command itself is for later."""
    with contextlib.suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != command:
            os.waitpid(ended.si_pid, 0)


def left_behind() -> list[str]:
    """What is still there of a command some seconds after its end; it is ended."""
    import psutil

    deadline = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return []
    left = psutil.Process().children(recursive=True)
    for process in left:
        process.kill()
    return [str(process) for process in left]


def become(arguments: list[str], cwd: str, environment: dict[str, str], outputs: list[int]) -> NoReturn:
    """Be the command."""
    import multiprocessing.util

    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.util.spawnv_passfds = fork_instead
    subprocess._fork_exec = fork_command  # type: ignore[attr-defined]
    call_main(arguments)


def call_main(arguments: list[str], module: str = "shardwise") -> NoReturn:
    """What the `shardwise` script does, or `python -m MODULE`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["shardwise", *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except Exception:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking torch apart, object by object, takes a second


def fork_command(words: list[str], *others: Any) -> int:
    """What subprocess.Popen would do with `env … python -m shardwise ARGUMENTS`, forked from here; all else
    it does itself."""
    if words[0] != "env" or "-m" not in words:
        return int(_fork_exec(words, *others))
    _, _, _, _, _, stdin, _, _, stdout, _, stderr, _, _, _, new_session, *_ = others
    pid = os.fork()
    if pid:
        return pid
    atexit._clear()
    if new_session:
        os.setsid()
    for number, stream in enumerate((stdin, stdout, stderr)):
        os.dup2(stream, number)
    os.closerange(3, 1024)  # with that the caller sees that the program has started
    before, (module, *arguments) = words[1 : words.index("-m") - 1], words[words.index("-m") + 1 :]
    for flag, name in pairwise(before):
        if flag == "-u":
            os.environ.pop(name, None)
    os.environ.update(dict(word.split("=", 1) for word in before if "=" in word))
    call_main(arguments, module)


def fork_instead(path: bytes, words: list[str], passed: list[int]) -> int:
    """What would run `python -c CODE` with these files open, forked from here."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        highest = max(passed) + 1
        for first, behind in zip([2, *sorted(passed)], [*sorted(passed), max(highest, 1024)], strict=True):
            os.closerange(first + 1, behind)
        exec(words[words.index("-c") + 1], {"__name__": "__forked__"})
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
