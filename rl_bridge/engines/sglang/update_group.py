"""The process group of SGLang's distributed route: the executor's process and an engine's ranks.

SGLang meets it at a store of torch's, whose port has no key: whoever reaches it could take part. So
it is opened on the one address that the engine is to reach, and the group has a name of its own.
"""

import datetime as dt
import importlib
import socket
import threading
import uuid
from contextlib import suppress
from typing import Any

import torch

from rl_bridge.engines.sglang.compat import require
from rl_bridge.engines.sglang.handles import EngineHandle
from rl_bridge.engines.sglang.plugin import sender
from rl_bridge.errors import (
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)

__all__ = [
    "UpdateGroup",
]

# How long a broadcast that the engine has answered for may still take to be told here.
_SETTLE_S = 10.0


class UpdateGroup:
    """One group with the ranks of one engine. This process is its rank 0, and sends."""

    def __init__(self, handle: EngineHandle, address: str) -> None:
        """Prepare; nothing is opened.

        Args:
            handle: the engine.
            address: of this machine, as the engine reaches it.

        Raises:
            WeightBridgeUnavailableError: sglang is missing in this process.

        """
        self._handle = handle
        self._address = address
        self._meet = require("sglang.srt.utils").init_custom_process_group
        self._torch: Any = importlib.import_module("torch.distributed")  # it has few types
        self._group: Any = None
        self._store: Any = None
        self._ranks = 0
        self.name = ""
        """What SGLang knows it by; empty where there is none."""

    def join(self, backend: str) -> None:
        """Meet the engine's ranks, if that was not done.

        Raises:
            WeightUpdateRejectedError: SGLang refused, or it did not come about.
            EngineLost: the engine is gone.

        """
        if self.name and self._ranks == self._handle.num_ranks:
            return
        self.leave()
        self._ranks = self._handle.num_ranks
        self.name = f"{sender(self._handle.name)}-{uuid.uuid4().hex}"
        try:
            self._group = self._met(backend)
        except BaseException:
            self.leave()
            raise

    def _met(self, backend: str) -> Any:
        port = self._open()
        found: list[Any] = []
        # The two meet each other, so one of them needs a thread.
        thread = threading.Thread(
            target=self._meet_here, args=(backend, found), name="rlb-sglang-group", daemon=True
        )
        thread.start()
        succeeded, said = self._handle.ask(
            "init_weights_update_group",
            master_address=self._address,
            master_port=port,
            rank_offset=1,
            world_size=1 + self._ranks,
            group_name=self.name,
            backend=backend,
        )
        if succeeded:
            thread.join(self._handle.timeout_s)
            said = str(found[0]) if found else "it takes too long"
            if found and not isinstance(found[0], Exception):
                return found[0]
        msg = (
            f"no group with the engine came about at {self._address}:{port} ({said}). See that the "
            "engine reaches this address, or use route='import'."
        )
        raise WeightUpdateRejectedError(msg)

    def send(self, bucket: torch.Tensor) -> Any:
        """Begin to send `bucket` to all ranks; `end` waits for it."""
        return self._torch.broadcast(bucket, group=self._group, group_src=0, async_op=True)

    def end(self, work: Any) -> None:
        """Wait for what the engine answered for. A group that did not carry it is given up."""
        try:
            work.wait(dt.timedelta(seconds=_SETTLE_S))
        except RuntimeError:
            self.leave()

    def leave(self) -> None:
        """End the group, here and in the engine. The next update makes another one."""
        name, self.name = self.name, ""
        group, self._group = self._group, None
        self._store = None
        if not name:
            return
        with suppress(WeightBridgeError):  # an engine that is gone has no group either
            self._handle.ask("destroy_weights_update_group", group_name=name)
        if group is not None:
            with suppress(RuntimeError):
                self._torch.destroy_process_group(group)

    def _open(self) -> int:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            with socket.socket(family) as listening:
                listening.bind((self._address, 0))
                listening.listen()
                port = int(listening.getsockname()[1])
                self._store = self._torch.TCPStore(
                    self._address,
                    port,
                    None,
                    is_master=True,
                    timeout=dt.timedelta(seconds=self._handle.timeout_s),
                    wait_for_workers=False,
                    master_listen_fd=listening.fileno(),
                )
                listening.detach()  # the store's from now on
        except (OSError, RuntimeError) as error:
            msg = (
                f"nothing can be opened at {self._address} ({error}). Pass an address of this "
                "machine that the engine reaches."
            )
            raise WeightBridgeUnavailableError(msg) from error
        return port

    def _meet_here(self, backend: str, found: list[Any]) -> None:
        try:
            found.append(
                self._meet(
                    backend=backend,
                    store=self._torch.PrefixStore(self.name, self._store),
                    world_size=1 + self._ranks,
                    rank=0,
                    group_name=self.name,
                    timeout=dt.timedelta(seconds=self._handle.timeout_s),
                )
            )
        except Exception as error:  # noqa: BLE001 - told where it is waited for
            found.append(error)
