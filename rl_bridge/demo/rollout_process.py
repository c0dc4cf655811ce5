"""The rollout in a process of its own: a loop over frames there, a client here.

Started with `spawn`, so the two processes share nothing but the pipe and what the bridge hands
over. Requests and answers alternate; each receive has a deadline, and either side notices at once
when the other one is gone.
"""

import contextlib
import multiprocessing
import os
import signal
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.engines import has_processes, start_timeout_s
from rl_bridge.demo.failures import BadFrame, PeerGone
from rl_bridge.demo.frames import Channel, Frame
from rl_bridge.demo.rollout import InstallReply, RolloutWorker, SampleReply
from rl_bridge.demo.sampler import SampleBatch
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError

__all__ = ["RolloutProcess", "serve"]

_ANSWER_TIMEOUT_S = 60.0
# A trainer that says nothing for so long has been forgotten by everybody.
_IDLE_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0


def serve(connection: Connection, config: RolloutConfig) -> None:
    """Answer the trainer until it says stop, goes away or falls silent. Runs in the child."""
    # Ctrl-C reaches the whole group: the trainer decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if config.engine_log:
        _print_into(config.engine_log)
    channel = Channel(connection, peer="trainer")
    try:
        worker = RolloutWorker(config)
    except WeightBridgeUnavailableError as error:
        channel.send(Frame({"unavailable": str(error)}))
        return
    try:
        channel.send(Frame({"engine": worker.wait_until_ready()}))
        while (request := _next_request(channel)) is not None:
            channel.send(_answer(worker, request))
    finally:
        worker.close()
        channel.close()


def _print_into(log: str) -> None:
    """From now on, what this process prints goes into a file; what C libraries print, too."""
    with Path(log).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _next_request(channel: Channel) -> Frame | None:
    try:
        request = channel.receive(timeout_s=_IDLE_TIMEOUT_S)
    except (PeerGone, DeadlineExceeded):
        return None
    return None if request.values.get("do") == "stop" else request


def _answer(worker: RolloutWorker, request: Frame) -> Frame:
    values = request.values
    match values.get("do"):
        case "install":
            reply = worker.install(
                str(values["manifest"]), fail_half_way=bool(values["fail_half_way"])
            )
            return Frame(asdict(reply))
        case "sample":
            sampled = worker.sample(
                num_groups=int(values["num_groups"]), group_size=int(values["group_size"])
            )
            batch = sampled.batch
            return Frame(
                {
                    "version": sampled.version,
                    "sample_ms": sampled.sample_ms,
                    "labels": dict(sampled.labels),
                },
                {
                    "tokens": batch.tokens.numpy(),
                    "log_probs": batch.log_probs.numpy(),
                    "rewards": batch.rewards.numpy(),
                },
            )
        case other:
            raise BadFrame(f"the trainer asked for {other!r}, expected install, sample or stop")


class RolloutProcess:
    """The trainer's view of a rollout in another process."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the process; `wait_until_ready` waits for it, so that both sides start at once."""
        self._log = config.engine_log
        self._start_timeout_s = start_timeout_s(config.engine)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(there, config),
            name="rl-bridge-demo-rollout",
            # A daemon may not start processes. It ends with the pipe all the same.
            daemon=not has_processes(config.engine),
        )
        self._process.start()
        # Only the child may hold its end, or its death would not be noticed here.
        there.close()
        self._channel = Channel(here, peer="rollout")

    @property
    def pid(self) -> int:
        """The rollout's process id."""
        return self._process.pid or 0

    @property
    def place(self) -> str:
        """See `Rollout`."""
        return f"process {self.pid}"

    def wait_until_ready(self) -> str:
        """Wait until the engine has started, and return its name for people.

        Raises:
            WeightBridgeUnavailableError: it did not start.

        """
        values = self._receive(self._start_timeout_s).values
        if "unavailable" in values:
            where = f" It is in {self._log}." if self._log else ""
            raise WeightBridgeUnavailableError(f"{values['unavailable']}{where}")
        return str(values["engine"])

    def install(self, manifest_json: str, *, fail_half_way: bool = False) -> InstallReply:
        """Send a manifest and wait for what became of it."""
        answer = self._ask(
            {"do": "install", "manifest": manifest_json, "fail_half_way": fail_half_way}
        )
        try:
            return InstallReply(**answer.values)
        except TypeError as error:
            raise BadFrame(f"not an answer to install: {error}") from error

    def sample(self, *, num_groups: int, group_size: int) -> SampleReply:
        """Ask for a batch."""
        answer = self._ask({"do": "sample", "num_groups": num_groups, "group_size": group_size})
        try:
            arrays = {name: torch.from_numpy(array) for name, array in answer.arrays.items()}
            batch = SampleBatch(**arrays, group_size=group_size)
            return SampleReply(batch=batch, **answer.values)
        except TypeError as error:
            raise BadFrame(f"not an answer to sample: {error}") from error

    def close(self) -> None:
        """Stop the process; one that does not stop is killed. Idempotent."""
        with contextlib.suppress(PeerGone, DeadlineExceeded):  # it may be gone, or stuck
            self._channel.send(Frame({"do": "stop"}))
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_STOP_TIMEOUT_S)
        self._channel.close()

    def _ask(self, values: dict[str, Any]) -> Frame:
        self._channel.send(Frame(values))
        return self._receive(_ANSWER_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Frame:
        try:
            return self._channel.receive(timeout_s=timeout_s)
        except (PeerGone, DeadlineExceeded) as error:
            if not self._log:
                raise
            raise type(error)(f"{error}. What it printed is in {self._log}.") from error
