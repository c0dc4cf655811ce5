"""The seams of miles and SkyRL: two ranks, two engines, one of which refuses a version."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.compat import miles
from rl_bridge.compat.servers import EngineServers
from rl_bridge.compat.skyrl import bridged
from rl_bridge.errors import (
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from tests.integrations.frameworks import FSDPPolicyWorkerBase, miles_modules, sky_client
from tests.trainers_torch.worlds import World


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(2, tmp_path_factory.mktemp("ranks"), "tests.integrations.framework_ranks")
    yield made
    made.leave()


@pytest.mark.parametrize("syncs", ["miles_syncs", "skyrl_syncs"])
def test_a_version_that_one_engine_refuses_reaches_none_and_raises_on_all_ranks(
    syncs: str, ranks: World
) -> None:
    first, other = ranks.run(syncs)
    # The second version is refused before any engine installs it, the third one by one as it does.
    assert first["held"] == [[1, 1], [1, 1], [3, 1], [4, 4]]
    refused, undone = first["errors"]
    assert "refused by 1 of 2 engines, and all keep the version before" in refused
    assert "http://127.0.0.1:2: RuntimeError: planted in prepare" in refused
    assert "not in 1 of 2 engines, which keep the version before; the others have it" in undone
    assert "http://127.0.0.1:2: RuntimeError: planted in install" in undone
    assert len(other["errors"]) == 2
    assert all("the trainer's first rank" in one for one in other["errors"])


def test_a_server_that_is_torn_by_a_version_is_named_as_one_that_must_be_recovered() -> None:
    class Torn(ModuleInstallAdapter):
        def install(self, *_: object) -> None:
            raise RuntimeError("planted in install")

        def undo(self) -> None:
            raise RuntimeError("planted in undo")

    weights = torch.nn.Linear(4, 4).state_dict()
    servers = EngineServers("shared-memory")
    with closing(servers):
        servers.connect(
            {"one": ModuleInstallAdapter(torch.nn.Linear(4, 4)), "two": Torn(torch.nn.Linear(4, 4))}
        )
        with pytest.raises(WeightUpdateRejectedError, match="of which two must be rec") as caught:
            servers.update(weights.items(), 1)
    assert "keep the version before" not in str(caught.value)
    assert isinstance(caught.value.__cause__, TornEngine)


@pytest.fixture
def named_miles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in miles_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"colocate": True}, WeightBridgeUnavailableError, "Run without --colocate"),
        ({"rl_bridge": "nixl"}, TypeError, "expected a mapping"),
    ],
)
def test_what_miles_cannot_do_is_refused_by_name(
    options: dict[str, object], kind: type[Exception], says: str, named_miles: None
) -> None:
    with pytest.raises(kind, match=says):
        miles.build_protocol(Namespace(**options))


@pytest.mark.parametrize(("colocated", "replicas"), [(True, 1), (False, 2)])
def test_what_skyrl_cannot_do_is_refused_by_name(colocated: bool, replicas: int) -> None:
    worker = bridged(FSDPPolicyWorkerBase)(colocate_all=colocated)
    client = sky_client("http://127.0.0.1:1", data_parallel_size=replicas)
    with pytest.raises(WeightBridgeUnavailableError, match="engines of their own"):
        asyncio.run(worker.init_weight_sync_state(client, None))


def test_no_worker_of_skyrl_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="policy worker of SkyRL"):
        bridged(torch.nn.Linear)
