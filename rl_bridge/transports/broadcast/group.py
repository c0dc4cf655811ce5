"""A process group of the trainer and some engines, apart from all other groups of theirs.

The group is made from the backend's class itself and registered nowhere: no default group is
touched, and a name can be used again. Its rendezvous is a store whose values travel over the
connections that the members have anyway, so that no port without a token is opened for it.

Gloo has three habits that this module lives with. It may not notice that a member died: what it
had begun to send then ends only at its deadline, so each wait looks from time to time whether it
can still succeed. A member that connects to others cannot be stopped, so groups are made in a
thread of their own. And slices that were begun cannot be called off, so after a transfer broke off
the arena is not used again before they have ended (`BrokenGroups`).
"""

import importlib
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # what torch.distributed shows without exporting it

from rl_bridge.errors import DeadlineExceeded, SegmentError
from rl_bridge.transports.broadcast.messages import Backend

_LOG = logging.getLogger(__name__)

# Slices under way at a time: one on the wire, one whose receiver is ready, one being digested.
_WINDOW = 3
_GLOO_THREADS = 2
_POLL_S = 0.0002
_LOOK_S = 0.1
# First the members' values come, then the members connect: each takes at most one deadline.
_PHASES = 2


class GroupStore(Store):
    """The values of a rendezvous: each member has all of them, and sends its own to the others."""

    def __init__(self, send: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        """Start empty; `send` passes a value on to the other members."""
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def learn(self, key: str, value: bytes) -> None:
        """Note another member's value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End every wait: a member is gone."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    # ---- calls from torch -----------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value, and send it to the others."""
        data = value if isinstance(value, bytes) else value.encode("utf-8")
        self.learn(key, data)
        self._send(key, data)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for values.

        Raises:
            DeadlineExceeded: they did not come in time.
            SegmentError: a member is gone.

        """
        left = self._timeout_s
        if timeout is not None:
            left = min(left, timeout.total_seconds())

        def is_there() -> bool:
            return self._failure is not None or all(key in self._values for key in keys)

        with self._changed:
            in_time = self._changed.wait_for(is_there, left)
        if self._failure is not None:
            raise SegmentError(f"the group did not come about: {self._failure}. Try again.")
        if not in_time:
            raise DeadlineExceeded(
                f"a member of the group did not come within {left} s. Check that every engine can "
                "reach the publisher's address, or raise timeout_s."
            )

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: this store keeps the deadline that it was made with."""

    def delete_key(self, key: str) -> bool:
        """Forget a value, in this process."""
        return self._values.pop(key, None) is not None


class Group:
    """One process group. Used by one thread at a time; its calls raise RuntimeError if they fail.

    Attributes:
        why_aborted: says why the transfer cannot succeed any longer; None while it can.

    """

    def __init__(
        self,
        backend: Backend,
        store: GroupStore,
        *,
        rank: int,
        size: int,
        address: str,
        timeout_s: float,
        why_aborted: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Meet the other members, of whom rank 0 sends.

        `timeout_s` bounds the rendezvous, and each slice. `address` is the one of this machine's
        interface, for Gloo.

        Raises:
            RuntimeError: the others did not come in time, it was aborted, or torch refuses.

        """
        self._store = store  # torch calls back into it for as long as the group lives
        self._timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._is_device = backend != "gloo"
        self._pending: list[Any] = []
        self.why_aborted = why_aborted
        self._group: Any = None
        if self._is_device:
            self._group = _make_nccl(store, rank, size, address, self._timeout)
        else:
            make = partial(_make_gloo, store, rank, size, address, self._timeout)
            self._group = _made_in_thread(make, why_aborted, timeout_s=_PHASES * timeout_s)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send (rank 0) or receive one contiguous tensor."""
        # The backend would send other bytes of a strided tensor, and raise nothing.
        assert tensor.is_contiguous(), "only contiguous memory is ever sent"
        options = torch._C._distributed_c10d.BroadcastOptions()  # noqa: SLF001 - torch has no public name for it
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        with torch.cuda.device(tensor.device) if self._is_device else nullcontext():
            work = self._group.broadcast([tensor], options)
        self._pending.append(work)
        return work

    def finish(self, work: Any) -> None:
        """Wait for the end of a `broadcast`."""
        until = time.monotonic() + self._timeout_s
        while not self._has_ended(work):
            reason = self.why_aborted()
            if reason is not None:
                raise SegmentError(f"{reason}. Try again.")
            if time.monotonic() > until:
                raise DeadlineExceeded(f"no slice within {self._timeout_s} s. Try again.")
        self._pending.remove(work)
        if not self._is_device:
            work.wait(self._timeout)  # does not wait: raises the error if it failed

    def _has_ended(self, work: Any) -> bool:
        """Wait a moment; returns whether it has ended by then."""
        if not self._is_device:
            with suppress(RuntimeError):  # a moment was not enough, or it failed
                work.wait(timedelta(seconds=_LOOK_S))
            return bool(work.is_completed())
        # NCCL's `wait` only orders streams; this waits for the bytes.
        until, pause = time.monotonic() + _LOOK_S, threading.Event()
        while not work.is_completed() and time.monotonic() < until:
            pause.wait(_POLL_S)
        return bool(work.is_completed())

    @property
    def is_idle(self) -> bool:
        """Whether the group no longer reads or writes any tensor that `broadcast` was given."""
        self._pending = [work for work in self._pending if not work.is_completed()]
        return not self._pending

    def drain(self) -> bool:
        """Leave, and wait until all slices that were begun have ended; returns whether they have.

        Gloo ends a slice at its deadline; a slice that no thread of Gloo has taken up by then ends
        at the next deadline.
        """
        if self._is_device:
            self.close()  # NCCL aborts what is under way
        until = time.monotonic() + (_WINDOW + 1) * self._timeout_s
        pause = threading.Event()
        while not self.is_idle and time.monotonic() < until:
            pause.wait(_LOOK_S)
        has_ended = self.is_idle
        if has_ended:
            self.close()
        return has_ended

    def close(self) -> None:
        """Leave: other members that wait for this one get an error. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._is_device:
            group.abort()
        del group  # the last reference: Gloo's threads and sockets end with it


class BrokenGroups:
    """Groups whose transfer broke off, until nothing of theirs reads or writes memory any longer.

    Each is drained in a thread of its own, so that the publisher goes on at once.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._threads: list[threading.Thread] = []

    def end(self, group: Group, then: Callable[[], object]) -> None:
        """End a group, and call `then` when its memory may be used again.

        That may be at once, in this thread. If the backend does not end what it began, `then` is
        never called and the memory is kept.
        """
        if group.is_idle:
            group.close()
            then()
            return
        thread = threading.Thread(
            target=_drain, args=(group, then), name="rlb-broadcast-drain", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, at most `timeout_s`; returns whether they have."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _drain(group: Group, then: Callable[[], object]) -> None:
    if group.drain():
        then()
    else:
        _LOG.error("a broadcast that broke off does not end; the memory of its version is kept")


def gloo_cause(address: str) -> str | None:
    """Why Gloo cannot use the interface of an address; None if it can."""
    try:
        _gloo().create_device(hostname=address)
    except RuntimeError as error:
        return f"Gloo cannot use {address}: {error}"
    return None


def _gloo() -> Any:
    # Imported untyped: torch's stubs lack the function that names an interface.
    return importlib.import_module("torch.distributed").ProcessGroupGloo


def _made_in_thread(
    make: Callable[[], object], why_aborted: Callable[[], str | None], *, timeout_s: float
) -> object:
    """Make a group in a thread of its own, and wait for it as long as it can succeed."""
    found: SimpleQueue[object] = SimpleQueue()

    def meet() -> None:
        try:
            found.put(make())
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            found.put(error)

    threading.Thread(target=meet, name="rlb-broadcast-meet", daemon=True).start()
    until = time.monotonic() + timeout_s
    while True:
        with suppress(Empty):
            made = found.get(timeout=_LOOK_S)
            if isinstance(made, Exception):
                raise made
            return made
        reason = why_aborted()
        if reason is not None:
            raise SegmentError(f"the group did not come about: {reason}. Try again.")
        if time.monotonic() > until:
            raise DeadlineExceeded(f"no group within {timeout_s} s. Try again.")


def _make_gloo(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> object:
    kind = _gloo()
    options = kind._Options()  # noqa: SLF001 - torch has no public name for it
    # By address: this machine's name may lead to an interface that no peer can reach.
    options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001 - as above
    options._timeout = timeout  # noqa: SLF001 - as above
    options._threads = _GLOO_THREADS  # noqa: SLF001 - as above
    made: object = kind(store, rank, size, options)
    return made


def _make_nccl(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> object:
    del address  # NCCL chooses interfaces itself (NCCL_SOCKET_IFNAME)
    kind: Any = importlib.import_module("torch.distributed").ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout  # noqa: SLF001 - as above
    made: object = kind(store, rank, size, options)
    return made


def said(error: BaseException) -> str:
    """What an error says, in one line: without Gloo's place in its source, and its advice."""
    first = (str(error).splitlines() or [""])[0]
    short = re.sub(r"^\[\S+\.(?:cc|h):\d+\] ", "", first).partition(". This is typically")[0]
    return short.rstrip(".")[:500] or type(error).__name__


def send_slices(
    group: Group,
    arena: torch.Tensor,
    slice_nbytes: int,
    *,
    meanwhile: Callable[[int], None] | None = None,
) -> None:
    """Send or receive an arena, slice by slice, several under way at a time.

    The arena is contiguous and laid out alike on both sides, so slices of it serve as buckets for
    tensors of every size, without a copy.

    Args:
        group: the group.
        arena: all of it, uint8.
        slice_nbytes: bytes of one slice, the same on all sides.
        meanwhile: called with the number of bytes that are complete, while the next slices travel.

    Raises:
        SegmentError: a slice failed, was aborted or did not come in time. Slices that were begun
            may still read or write the arena until the group has drained.

    """
    total = arena.numel()
    starts = range(0, total, slice_nbytes)
    works: list[Any] = []
    for index in range(len(starts) + _WINDOW - 1):
        done = index - _WINDOW + 1
        try:
            if index < len(starts):
                start = starts[index]
                works.append(group.broadcast(arena[start : start + slice_nbytes]))
            if 0 <= done < len(works):
                group.finish(works[done])
                if meanwhile is not None:
                    meanwhile(min(starts[done] + slice_nbytes, total))
        except RuntimeError as error:
            reason = said(error)
            break
        if 0 <= done < len(works):
            works[done] = None
    else:
        return
    # Raised from here, without the cause: its traceback would keep the group's sockets open.
    works.clear()
    raise SegmentError(f"a slice did not get through: {reason}. Send the version again.")
