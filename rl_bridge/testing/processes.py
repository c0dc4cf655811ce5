"""Real processes for tests: talked to in JSON, never waited for without a deadline.

What crosses to a child is a function, classes and plain arguments, and from then on JSON text: an
object that took its bytes along by pickle would hide exactly the lies that these tests look for.

Children come from a server that has imported torch, and nothing of ours unless `PRELOADED` says so:
a spawned process takes seconds for that alone. They share no memory with the test, and have its
environment and output as these are when they start.
"""

import json
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, ClassVar, Self

from rl_bridge.errors import DeadlineExceeded, WeightBridgeError

DEADLINE_S = 60.0
_SERVED = multiprocessing.get_context("forkserver")
PRELOADED = ["torch"]
"""Modules that the server imports before its first child; to be added to before that."""
_ENDED = "bye"
_OUTPUT = (1, 2)


class ChildDied(WeightBridgeError):
    """A child ended before it answered; `exitcode` is negative for a signal."""

    def __init__(self, message: str, exitcode: int | None) -> None:
        """Keep the exit code readable."""
        super().__init__(message)
        self.exitcode = exitcode


class ChildError(WeightBridgeError):
    """A call in a child raised; `kind` is the exception's class name, `lineage` its bases' too."""

    def __init__(self, kind: str, lineage: tuple[str, ...], message: str, trace: str) -> None:
        """Keep the parts readable."""
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.lineage = lineage
        self.message = message


def free_port() -> int:
    """A port of the loopback that nobody listens on.

    It is below the ports that the kernel gives to clients: a server may take minutes until it
    listens.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(condition: Callable[[], object], *, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds.

    Raises:
        DeadlineExceeded: it did not, in time.

    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise DeadlineExceeded(f"not within {deadline_s} s: {what}")
        time.sleep(0.002)


def stop_process(pid: int) -> None:
    """SIGSTOP, as if it hung, and wait until no thread of it runs any more: it is only sent."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(
        lambda: all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for thread in threads.iterdir()
        ),
        what=f"process {pid} is stopped",
    )


class Line:
    """One end of a two-way pipe that carries JSON text."""

    def __init__(self, connection: Connection, *, send_timeout_s: float = DEADLINE_S) -> None:
        """Talk over `connection`."""
        self._connection = connection
        self._send_timeout_s = send_timeout_s
        # Such a pipe is a pair of sockets, and the kernel keeps the time. The option belongs to
        # the socket, so it holds for the connection although a duplicate sets it.
        seconds, rest = divmod(send_timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
        with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Any) -> None:
        """Send one JSON value.

        Raises:
            DeadlineExceeded: the other end read nothing in time; it is stopped, or stuck.
            ConnectionError: the other end is gone.

        """
        try:
            self._connection.send_bytes(json.dumps(message).encode("ascii"))
        except BlockingIOError as error:
            raise DeadlineExceeded(
                f"the other process took no message within {self._send_timeout_s:g} s: end it"
            ) from error

    def receive(self, *, deadline_s: float = DEADLINE_S) -> Any:
        """Wait for one JSON value.

        Raises:
            DeadlineExceeded: nothing came in time.
            EOFError: the other end is gone.

        """
        if not self._connection.poll(deadline_s):
            raise DeadlineExceeded(f"no answer within {deadline_s} s")
        return json.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def start_server() -> None:
    """Start the process that children come from. It stays, with a few descriptors of this one."""
    _SERVED.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


# Builds, in the child, the object whose methods the parent calls.
Target = Callable[..., object]


class Surroundings:
    """The parent's environment and output, which the child takes instead of the server's."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Travel as what is to be done in the child."""
        return _settle_in, (dict(os.environ), *map(DupFd, _OUTPUT))


def _settle_in(environment: dict[str, str], *outputs: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, output in zip(_OUTPUT, outputs, strict=True):
        descriptor = output.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)


def _serve_settled(_: Surroundings, *given: Any) -> None:
    # Ctrl-C reaches the whole process group: the parent decides what it means, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(*given)


def serve(connection: Connection, target: Target, arguments: dict[str, Any]) -> None:
    """Build the object of a `Child`, in its process, and answer calls until the parent hangs up."""
    import torch

    torch.set_num_threads(1)
    line = Line(connection)
    try:
        served = target(**arguments)
        line.send({"to": 0, "ok": "ready"})
        while True:
            # The parent may be busy with another child: only its end of the pipe matters.
            number, name, options = line.receive(deadline_s=20 * DEADLINE_S)
            if name == _ENDED:
                break
            try:
                answer = {"to": number, "ok": getattr(served, name)(**options)}
            except Exception as error:  # noqa: BLE001 - sent to the parent, which judges
                answer = {"to": number, "error": _describe(error)}
            line.send(answer)
    except EOFError:
        pass  # the parent is gone: nobody is left to answer
    except Exception as error:  # noqa: BLE001 - sent to the parent, which judges
        line.send({"to": 0, "error": _describe(error)})


def _describe(error: Exception) -> list[Any]:
    lineage = [kind.__name__ for kind in type(error).__mro__]
    trace = "".join(traceback.format_exception(error))
    return [type(error).__name__, lineage, str(error), trace]


class Child:
    """A process that serves one object; its methods are called with `call`. It ignores Ctrl-C.

    Use as a context manager: whatever still runs at the end is killed, before any assertion of the
    caller's can be skipped over.
    """

    is_daemon: ClassVar[bool] = True
    """Ended with this process, also where nobody ends it; but it may start no processes."""

    def __init__(self, target: Target, **arguments: Any) -> None:
        """Start; `ready` waits until the object was built.

        Args:
            target: class or function, importable by name, that makes the object in the child.
            arguments: what it is called with; it must be importable or plain.

        """
        self.arguments = arguments
        here, there = _SERVED.Pipe()
        self._line = Line(here)
        self.process = self._started(there, target)
        there.close()
        self._is_ready = self._is_over = False
        # Calls have numbers: an answer that came too late must not pass for that to the next call.
        self._calls = 0
        self._told: deque[int] = deque()
        self._answers: dict[int, dict[str, Any]] = {}

    def _started(self, there: Connection, target: Target) -> Any:
        """Start the process that has the other end of the line."""
        start_server()
        process = _SERVED.Process(
            target=_serve_settled,
            args=(Surroundings(), there, target, self.arguments),
            daemon=self.is_daemon,
            name=f"test-{target}",
        )
        process.start()
        return process

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self.process.pid or -1

    def ready(self, *, deadline_s: float = DEADLINE_S) -> Self:
        """Wait until the object is built in the child.

        Raises:
            ChildError: building it raised.
            ChildDied: the child ended.
            DeadlineExceeded: it is not built in time.

        """
        if not self._is_ready:
            self._is_ready = True
            self._answer(0, "start", deadline_s)
        return self

    def call(self, name: str, /, **options: Any) -> Any:
        """Call a method of the child's object with JSON arguments, and wait for its answer.

        Raises:
            ChildError: it raised.
            ChildDied: the child ended instead of answering.
            DeadlineExceeded: no answer in time.

        """
        return self._answer(self._ask(name, options), name)

    def tell(self, name: str, /, **options: Any) -> None:
        """Call a method without waiting; `exitcode` or `answer` tells what became of it.

        Raises:
            ChildDied: the child ended before.

        """
        self._told.append(self._ask(name, options))

    def answer(self, *, deadline_s: float = DEADLINE_S) -> Any:
        """Wait for the answer to the oldest `tell` without one; raises as `call`."""
        return self._answer(self._told.popleft(), "it", deadline_s)

    def _ask(self, name: str, options: dict[str, Any]) -> int:
        self.ready()
        self._calls += 1
        try:
            self._line.send([self._calls, name, options])
        except ConnectionError as error:
            raise self._died(name) from error
        return self._calls

    def _answer(self, number: int, name: str, deadline_s: float = DEADLINE_S) -> Any:
        try:
            while number not in self._answers:
                answer = self._line.receive(deadline_s=deadline_s)
                self._answers[answer["to"]] = answer
        except (EOFError, ConnectionError) as error:
            raise self._died(name) from error
        answer = self._answers.pop(number)
        if "error" in answer:
            kind, lineage, message, trace = answer["error"]
            raise ChildError(kind, tuple(lineage), message, trace)
        return answer["ok"]

    def _died(self, name: str) -> ChildDied:
        code = self.exitcode()
        return ChildDied(f"the child ended with {code} before it answered {name}", code)

    def exitcode(self, *, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the child's end; negative for a signal.

        Raises:
            DeadlineExceeded: it still runs; it is killed.

        """
        self.process.join(deadline_s)
        code: int | None = self.process.exitcode
        if code is None:
            self.kill()
            raise DeadlineExceeded(f"the child did not end within {deadline_s} s and was killed")
        return code

    def stop(self) -> int:
        """End it in peace and return its exit code."""
        with suppress(ConnectionError):  # it may have ended before: the exit code tells how
            self._line.send([0, _ENDED, {}])
        return self.exitcode()

    def kill(self) -> None:
        """SIGKILL, and wait for the kernel to have taken it down."""
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs and give the pipe back; done twice, it is as before."""
        if not self._is_over:
            self._is_over = True
            self.kill()
            self._line.close()
            self.process.close()


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Turn a hang of this (main) thread into an exception.

    Raises:
        DeadlineExceeded: the body took longer.

    """

    def bark(_number: int, _frame: object) -> None:
        raise DeadlineExceeded(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
