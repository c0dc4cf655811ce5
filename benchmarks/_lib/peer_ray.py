"""Ray's object store with zero-copy tensors: two drivers, the reference through an actor.

``RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1`` must be set before Ray is imported; the lane does that.
Without it Ray pickles every tensor in band, which is some twenty times slower.
"""

import asyncio
import functools
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from _lib.lanes import BaseConsumer, BasePublisher, LaneContext

__all__ = ["RayConsumer", "RayPublisher"]

# Room for the version in use, the one that arrives, and the store's own bookkeeping.
_STORE_FACTOR = 4
_STARTS = 3
_STORE_EXTRA = 256 << 20
_NAMESPACE = "benchmark"
_MAILBOX = "mailbox"


@functools.cache
def _token() -> str:
    """Return this process's token; Ray reads it once and keeps it."""
    return secrets.token_hex(32)


def _import_ray(token: str) -> Any:
    """Import Ray with a token that only this run knows, rather than one kept in the home folder."""
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=token,
        # The store's pages are touched when it starts, not by the first updates.
        RAY_preallocate_plasma_memory="1",
    )
    import ray

    return ray


def _mailbox_class() -> type:
    """Return the actor that carries references between drivers, so that Ray can count them.

    Local, because Ray then sends the class itself: its workers cannot import this folder.
    """

    class Mailbox:
        def __init__(self) -> None:
            self._held: dict[int, asyncio.Future[list[Any]]] = {}

        def _slot(self, version: int) -> "asyncio.Future[list[Any]]":
            return self._held.setdefault(version, asyncio.get_running_loop().create_future())

        async def put(self, version: int, references: list[Any]) -> None:
            self._slot(version).set_result(references)

        async def take(self, version: int) -> list[Any]:
            # The two drivers' calls arrive in any order.
            references = await self._slot(version)
            del self._held[version]
            return references

    return Mailbox


class RayPublisher(BasePublisher):
    """``ray.put`` of the whole state dict."""

    def __init__(self, context: LaneContext) -> None:
        """Start a local Ray of its own."""
        super().__init__(context)
        token = _token()
        self._ray = _import_ray(token)
        # Ray puts sockets below this folder, and a socket's path must stay short.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        started = self._start(context.spec.nbytes * _STORE_FACTOR + _STORE_EXTRA)
        self._hello = {"address": started.address_info["gcs_address"], "token": token}
        actor = self._ray.remote(_mailbox_class()).options(name=_MAILBOX, num_cpus=0)
        self._mailbox = actor.remote()
        self._references: list[Any] = []

    def _start(self, store_nbytes: int) -> Any:
        """Start Ray; where memory was never used before, touching it may take a try too long."""
        for _ in range(_STARTS - 1):
            try:
                return self._init(store_nbytes)
            except Exception as error:  # Ray raises no class of its own here
                if "timed out during startup" not in str(error):
                    raise
                self._ray.shutdown()
        return self._init(store_nbytes)

    def _init(self, store_nbytes: int) -> Any:
        return self._ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=store_nbytes,
            log_to_driver=False,
            logging_level="ERROR",
            namespace=_NAMESPACE,
            _temp_dir=self._folder,
        )

    def hello(self) -> bytes:
        """Tell where this Ray is and what it asks for."""
        return json.dumps(self._hello).encode()

    def publish(self, version: int) -> bytes:
        """Put the tensors into the store and send the reference."""
        reference = self._ray.put(self.payload.tensors)
        self._references.append(reference)
        self._mailbox.put.remote(version, [reference])
        return str(version).encode()

    def after(self) -> dict[str, float]:
        """Let go of the objects."""
        self._references.clear()
        return {}

    def close(self) -> None:
        """End this Ray."""
        self._ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class RayConsumer(BaseConsumer):
    """``ray.get`` of the reference: views of the store."""

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Connect to the trainer's Ray."""
        super().__init__(context, hello)
        told = json.loads(hello)
        self._ray = _import_ray(told["token"])
        self._ray.init(
            address=told["address"],
            log_to_driver=False,
            logging_level="ERROR",
            namespace=_NAMESPACE,
        )
        self._mailbox = self._ray.get_actor(_MAILBOX)

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Get the tensors."""
        timeout_s = self.context.timeout_s
        references = self._ray.get(self._mailbox.take.remote(int(message)), timeout=timeout_s)
        tensors: dict[str, torch.Tensor] = self._ray.get(references[0], timeout=timeout_s)
        return tensors

    def close(self) -> None:
        """Disconnect."""
        self._ray.shutdown()
