"""What the two ranks of `test_framework_ranks` do; the engines are modules of the first one."""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from rl_bridge import ModuleInstallAdapter
from rl_bridge.compat import miles, skyrl
from rl_bridge.errors import WeightBridgeError
from tests.integrations.frameworks import (
    FSDPPolicyWorkerBase,
    MilesUpdater,
    Tensors,
    sky_client,
    use_miles,
)

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
Sync = Callable[[Tensors], None]


class Engine(ModuleInstallAdapter):
    """A module behind a URL, which may refuse its next version, or fail as it installs it."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(4, 4)
        self.fails = ""
        super().__init__(self.module, mode="copy")

    def prepare(self, manifest: Any, weights: Any) -> Any:
        self._fail("prepare")
        return super().prepare(manifest, weights)

    def install(self, manifest: Any, weights: Any) -> Any:
        self._fail("install")
        return super().install(manifest, weights)

    def _fail(self, step: str) -> None:
        if step == self.fails:
            raise RuntimeError(f"planted in {step}")


def _weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 4), value), "bias": torch.full((4,), value)}


def _told(sync: Sync, engines: list[Engine]) -> dict[str, Any]:
    """Syncs, of which the last engine fails some; what each engine has after each."""
    held, errors = [], []
    for value, fails in ((1.0, ""), (2.0, "prepare"), (3.0, "install"), (4.0, "")):
        engines[1].fails = fails
        try:
            sync(_weights(value))
        except WeightBridgeError as error:
            errors.append(str(error))
        held.append([float(one.module.weight[0, 0]) for one in engines])
    return {"held": held, "errors": errors}


def miles_syncs() -> dict[str, Any]:
    """By miles' updater."""
    use_miles()
    engines = [Engine(), Engine()]
    of_url = dict(zip(URLS, engines, strict=True))
    with (
        mock.patch.object(miles, "connect", lambda url, **_: url),
        mock.patch.object(miles, "SGLangInstallAdapter", lambda url, **_: of_url[url]),
    ):
        servers = [SimpleNamespace(server_url=url) for url in URLS]
        protocol = miles.build_protocol(Namespace())
        updater = MilesUpdater(protocol, servers)
        return _told(updater.update_weights, engines)


def skyrl_syncs() -> dict[str, Any]:
    """By SkyRL's policy worker."""
    engines = [Engine(), Engine()]
    of_url = dict(zip(URLS, engines, strict=True))
    with mock.patch.object(skyrl, "VLLMEngineAdapter", lambda url, **_: of_url[url]):
        worker = skyrl.bridged(FSDPPolicyWorkerBase)()
        asyncio.run(worker.init_weight_sync_state(sky_client(*URLS), None))

        def sync(weights: Tensors) -> None:
            worker.weights = weights
            asyncio.run(worker.broadcast_to_inference_engines())

        told = _told(sync, engines)
        worker._weight_transfer_sender.teardown()
        return told


_syncs: list[Sync] = []
_leaves: list[Callable[[], None]] = []


def miles_begins(url: str, key: str) -> None:
    """Connect miles' updater to a real server."""
    use_miles()
    protocol = miles.build_protocol(Namespace(rl_bridge={"timeout_s": 60.0}))
    updater = MilesUpdater(protocol, [SimpleNamespace(server_url=url, api_key=key)])
    _syncs.append(updater.update_weights)
    _leaves.append(protocol.close)


def skyrl_begins(url: str) -> None:
    """Connect SkyRL's worker to a real server."""
    worker = skyrl.bridged(FSDPPolicyWorkerBase, timeout_s=60.0)()
    asyncio.run(worker.init_weight_sync_state(sky_client(url), None))

    def sync(weights: Tensors) -> None:
        worker.weights = weights
        asyncio.run(worker.broadcast_to_inference_engines())

    _syncs.append(sync)
    _leaves.append(worker._weight_transfer_sender.teardown)


def sync(path: str, *, damaged: str = "") -> str:
    """Sync a checkpoint's tensors, of which one may hold NaN; what it raised."""
    weights = {
        name: one
        for file in sorted(Path(path).glob("*.safetensors"))
        for name, one in load_file(file).items()
    }
    if damaged:
        weights[damaged] = torch.full_like(weights[damaged], torch.nan)
    try:
        _syncs[-1](weights)
    except WeightBridgeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leave_engines() -> None:
    """Leave the server to the next trainer."""
    _leaves[-1]()
