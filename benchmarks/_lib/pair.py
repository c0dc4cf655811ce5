"""Starts the trainer and the engine, tells them what to do, and collects the samples."""

import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch.multiprocessing

from _lib.lanes import LaneSpec
from _lib.payload import PayloadSpec
from _lib.roles import PairConfig, run_engine, run_trainer
from _lib.wire import BenchmarkError, recv_json, send_json

__all__ = ["LaneFailedError", "Pair"]

_START_S = 120.0
_EXIT_S = 20.0
_NS_PER_S = 1e9


class LaneFailedError(BenchmarkError):
    """One lane could not go on; the others can."""


class Pair:
    """Two spawned processes and a version counter."""

    def __init__(
        self, spec: PayloadSpec, lanes: Sequence[LaneSpec], *, timeout_s: float = 60.0
    ) -> None:
        """Start both processes and wait until each is ready."""
        self.timeout_s = timeout_s
        self.version = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="rl-bridge-bench-", dir="/dev/shm"))
        context = torch.multiprocessing.get_context("spawn")
        config = PairConfig(
            spec=spec,
            scratch=str(self._scratch),
            timeout_s=timeout_s,
            lanes=tuple(lanes),
            queues={lane.name: context.Queue() for lane in lanes if lane.options.get("queue")},
        )
        self._controls: dict[str, Connection] = {}
        self._processes: dict[str, BaseProcess] = {}
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: PairConfig) -> None:
        """Start both processes and wait until each is ready."""
        context = torch.multiprocessing.get_context("spawn")
        trainer_peer, engine_peer = context.Pipe()
        for role, entry, peer in (
            ("trainer", run_trainer, trainer_peer),
            ("engine", run_engine, engine_peer),
        ):
            ours, theirs = context.Pipe()
            process = context.Process(target=entry, args=(config, theirs, peer), name=role)
            process.start()
            theirs.close()
            peer.close()
            self._controls[role] = ours
            self._processes[role] = process
        for role, control in self._controls.items():
            recv_json(control, _START_S, role)

    def __enter__(self) -> Self:
        """Return the pair."""
        return self

    def __exit__(self, *_: object) -> None:
        """End both processes, by force where they do not."""
        self.close()

    def close(self) -> None:
        """End both processes and remove the scratch folder."""
        for role, process in self._processes.items():
            if process.is_alive():
                try:
                    send_json(self._controls[role], {"do": "exit"})
                    recv_json(self._controls[role], _EXIT_S, role)
                except (OSError, BenchmarkError):
                    process.kill()
            process.join(_EXIT_S)
            if process.is_alive():
                process.kill()
                process.join(_EXIT_S)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def both(self, command: dict[str, Any], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Send one command to both processes and return both answers."""
        command = {**command, "timeout_s": timeout_s}
        for control in self._controls.values():
            send_json(control, command)
        answers = {
            role: recv_json(control, 2 * timeout_s, role)
            for role, control in self._controls.items()
        }
        errors = {role: answer for role, answer in answers.items() if "error" in answer}
        if errors:
            role = min(errors, key=lambda name: bool(errors[name]["peer_failed"]))
            self.both({"do": "drain"}, timeout_s)
            message = f"{role}: {errors[role]['error']}"
            failure = LaneFailedError(message)
            failure.add_note(errors[role]["traceback"])
            raise failure
        return answers

    def memory(self) -> dict[str, dict[str, int]]:
        """Return what each process holds now, and with it the machine's shared memory."""
        return self.both({"do": "memory"}, self.timeout_s)

    def setup(self, lane: LaneSpec) -> None:
        """Build both sides of a lane."""
        self.both({"do": "setup", "lane": lane.name}, max(self.timeout_s, _START_S))

    def teardown(self, lane: LaneSpec, *, free_resident: bool = False) -> None:
        """Close both sides of a lane."""
        command = {"do": "teardown", "lane": lane.name, "free_resident": free_resident}
        self.both(command, self.timeout_s)

    def update(self, lane: LaneSpec, *, probe: bool = False, keep: bool = False) -> dict[str, Any]:
        """Run one update through a lane and return its sample."""
        self.version += 1
        answers = self.both(
            {
                "do": "update",
                "lane": lane.name,
                "version": self.version,
                "probe": probe,
                "keep": keep,
            },
            self.timeout_s,
        )
        trainer, engine = answers["trainer"], answers["engine"]
        started = trainer["started_ns"]
        sample: dict[str, Any] = {
            "version": self.version,
            "publish_s": (trainer["published_ns"] - started) / _NS_PER_S,
            "message_s": (engine["received_ns"] - trainer["published_ns"]) / _NS_PER_S,
            "receive_s": (engine["usable_ns"] - engine["received_ns"]) / _NS_PER_S,
            "usable_s": (engine["usable_ns"] - started) / _NS_PER_S,
            "loaded_s": (engine["loaded_ns"] - started) / _NS_PER_S,
            "load_s": (engine["loaded_ns"] - engine["usable_ns"]) / _NS_PER_S,
            "message_nbytes": trainer["message_nbytes"],
            "extras": {**trainer["extras"], **engine["extras"]},
        }
        if probe:
            sample["survives_step"] = engine["survives_step"]
            sample["survives_publish"] = engine["survives_publish"]
            sample["memory"] = {"trainer": trainer["memory"], "engine": engine["memory"]}
        return sample
