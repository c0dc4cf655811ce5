"""The two processes of the benchmark: what the trainer and the engine do when told.

One update, step by step: the trainer rewrites its weights, both say that they are ready, then the
trainer takes the time, publishes and sends the message; the engine takes the time when the tensors
are usable and again when they are loaded, checks the bytes, and says that it is done. Both clocks
are CLOCK_MONOTONIC, which Linux keeps equal in all processes of one machine.
"""

import ctypes
import gc
import os
import resource
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from _lib.lanes import LaneContext, LaneSpec, Resident, load_side
from _lib.memory import process_nbytes, shared_nbytes
from _lib.payload import Payload, PayloadSpec, find_wrong_tensor
from _lib.wire import (
    DONE,
    FAILED,
    MESSAGE,
    READY,
    BenchmarkError,
    PeerFailedError,
    recv_json,
    recv_tagged,
    send_json,
    send_tagged,
)

__all__ = ["PairConfig", "run_engine", "run_trainer"]

# Long enough for OpenMP's workers, which spin after a parallel region, to have gone to sleep.
_SETTLE_S = 0.02
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """What both processes are started with."""

    spec: PayloadSpec
    scratch: str
    timeout_s: float
    lanes: tuple[LaneSpec, ...]
    queues: dict[str, Any] = field(default_factory=dict)


class _Role:
    """What both roles share: lanes by name, commands in, answers out."""

    side = ""

    def __init__(self, config: PairConfig, control: Connection, peer: Connection) -> None:
        self.config = config
        self.control = control
        self.peer = peer
        self.specs = {lane.name: lane for lane in config.lanes}
        self.open: dict[str, Any] = {}
        self.resident: Resident | None = None

    def context(self, lane: LaneSpec) -> LaneContext:
        """Return what this side of ``lane`` is built from."""
        os.environ.update(lane.environment)
        return LaneContext(
            spec=lane.spec or self.config.spec,
            payload=self.payload_for(lane),
            resident=self.resident,
            queue=self.config.queues.get(lane.name),
            scratch=Path(self.config.scratch),
            timeout_s=self.config.timeout_s,
            options=dict(lane.options),
        )

    def payload_for(self, lane: LaneSpec) -> Payload | None:
        """Return the source of a lane's weights; only the trainer has one."""
        del lane
        return None

    def serve(self) -> None:
        """Obey commands until told to stop; report failures instead of dying of them."""
        _raise_descriptor_limit()
        send_json(self.control, {"ready": True})
        while True:
            try:
                command = recv_json(self.control, _IDLE_S, "the controller")
            except BenchmarkError:
                self.close_lanes()
                raise
            if command["do"] == "exit":
                self.close_lanes()
                send_json(self.control, {})
                return
            try:
                answer = getattr(self, f"do_{command['do']}")(command)
            except Exception as error:  # noqa: BLE001 - the border of a process: report, go on
                if not isinstance(error, PeerFailedError):
                    send_tagged(self.peer, FAILED)
                answer = {
                    "error": f"{type(error).__name__}: {error}",
                    "peer_failed": isinstance(error, PeerFailedError),
                    "traceback": traceback.format_exc(),
                }
            send_json(self.control, answer)

    def close_lanes(self) -> None:
        """Close what is open, newest first."""
        while self.open:
            self.open.popitem()[1].close()

    def do_teardown(self, command: dict[str, Any]) -> dict[str, Any]:
        """Close one lane."""
        lane = self.open.pop(command["lane"], None)
        if lane is not None:
            lane.close()
        del lane
        if self.resident is not None and command.get("free_resident"):
            self.resident.free()
        gc.collect()
        _trim_heap()
        return {}

    def do_drain(self, command: dict[str, Any]) -> dict[str, Any]:
        """Throw away what an aborted update left on the pipe between the two."""
        del command
        while self.peer.poll(0):
            self.peer.recv_bytes()
        return {}

    def do_memory(self, command: dict[str, Any]) -> dict[str, Any]:
        """Report this process's memory."""
        del command
        return {**process_nbytes(), "shared": shared_nbytes()}


class _Trainer(_Role):
    side = "publisher"

    def __init__(self, config: PairConfig, control: Connection, peer: Connection) -> None:
        super().__init__(config, control, peer)
        self.payload: Payload | None = None

    def payload_for(self, lane: LaneSpec) -> Payload:
        """Return the shared source, or one of the lane's own size."""
        if lane.spec is not None:
            return Payload.build(lane.spec)
        if self.payload is None:
            self.payload = Payload.build(self.config.spec)
        return self.payload

    def do_setup(self, command: dict[str, Any]) -> dict[str, Any]:
        """Build the publisher and introduce it to the consumer."""
        lane = self.specs[command["lane"]]
        publisher = load_side(lane, self.side)(self.context(lane))
        self.open[lane.name] = publisher
        send_tagged(self.peer, MESSAGE, publisher.hello())
        recv_tagged(self.peer, DONE, command["timeout_s"])
        return {}

    def do_update(self, command: dict[str, Any]) -> dict[str, Any]:
        """Publish one version."""
        publisher = self.open[command["lane"]]
        publisher.fill(command["version"])
        timeout_s = command["timeout_s"]
        send_tagged(self.peer, READY)
        recv_tagged(self.peer, READY, timeout_s)
        if command["probe"]:
            _reset_peak()
        time.sleep(_SETTLE_S)
        started = time.monotonic_ns()
        message = publisher.publish(command["version"])
        published = time.monotonic_ns()
        send_tagged(self.peer, MESSAGE, message)
        recv_tagged(self.peer, DONE, timeout_s)
        answer: dict[str, Any] = {
            "started_ns": started,
            "published_ns": published,
            "message_nbytes": len(message),
        }
        if command["probe"]:
            answer["memory"] = {**process_nbytes(), "shared": shared_nbytes()}
        answer["extras"] = {} if command["keep"] else publisher.after()
        return answer


class _Engine(_Role):
    side = "consumer"

    def __init__(self, config: PairConfig, control: Connection, peer: Connection) -> None:
        super().__init__(config, control, peer)
        self.resident = Resident(config.spec)
        self.held: tuple[Mapping[str, torch.Tensor], int] | None = None

    def spec_of(self, lane_name: str) -> PayloadSpec:
        """Return what a lane's tensors look like."""
        return self.specs[lane_name].spec or self.config.spec

    def do_setup(self, command: dict[str, Any]) -> dict[str, Any]:
        """Build the consumer from what the publisher says."""
        lane = self.specs[command["lane"]]
        hello = recv_tagged(self.peer, MESSAGE, command["timeout_s"])
        consumer = load_side(lane, self.side)(self.context(lane), hello)
        self.open[lane.name] = consumer
        if not consumer.loads_itself and self.resident is not None:
            self.resident.allocate()
        send_tagged(self.peer, DONE)
        return {}

    def _held_is_intact(self, lane_name: str) -> bool | None:
        if self.held is None:
            return None
        tensors, version = self.held
        return find_wrong_tensor(tensors, self.spec_of(lane_name), version, full=True) is None

    def do_update(self, command: dict[str, Any]) -> dict[str, Any]:
        """Receive, load and check one version."""
        consumer = self.open[command["lane"]]
        timeout_s = command["timeout_s"]
        recv_tagged(self.peer, READY, timeout_s)
        survives_step = self._held_is_intact(command["lane"])
        if command["probe"]:
            _reset_peak()
        send_tagged(self.peer, READY)
        message = recv_tagged(self.peer, MESSAGE, timeout_s)
        survives_publish = self._held_is_intact(command["lane"])
        self.held = None
        received = time.monotonic_ns()
        tensors = consumer.receive(message)
        usable = time.monotonic_ns()
        loaded_tensors = tensors if consumer.loads_itself else consumer.load(tensors)
        loaded = usable if consumer.loads_itself else time.monotonic_ns()
        answer: dict[str, Any] = {
            "received_ns": received,
            "usable_ns": usable,
            "loaded_ns": loaded,
            "survives_step": survives_step,
            "survives_publish": survives_publish,
        }
        if command["probe"]:
            answer["memory"] = {**process_nbytes(), "shared": shared_nbytes()}
        self._check(command, tensors)
        if loaded_tensors is not tensors:
            self._check(command, loaded_tensors)
        if command["keep"]:
            self.held = (tensors, command["version"])
        del tensors, loaded_tensors
        answer["extras"] = {} if command["keep"] else consumer.after()
        send_tagged(self.peer, DONE)
        return answer

    def _check(self, command: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        # Every byte of the update that is kept; the next one shows what became of it.
        version, full = command["version"], command["keep"]
        wrong = find_wrong_tensor(tensors, self.spec_of(command["lane"]), version, full=full)
        if wrong is not None:
            msg = f"{command['lane']} delivered wrong bytes: {wrong}"
            raise BenchmarkError(msg)

    def do_teardown(self, command: dict[str, Any]) -> dict[str, Any]:
        """Forget what was held, then close the lane."""
        self.held = None
        return super().do_teardown(command)


def _trim_heap() -> None:
    """Give freed heap back to the system, so that one lane's garbage is not the next one's peak."""
    ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> None:
    """Start the peak of resident memory anew (5 = reset VmHWM)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system does: some peers need one per tensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_trainer(config: PairConfig, control: Connection, peer: Connection) -> None:
    """Be the trainer (entry point of a spawned process)."""
    _Trainer(config, control, peer).serve()


def run_engine(config: PairConfig, control: Connection, peer: Connection) -> None:
    """Be the engine (entry point of a spawned process)."""
    _Engine(config, control, peer).serve()
