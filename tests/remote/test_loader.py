"""`RemoteWeightLoader`: requests in batches become one update of an engine elsewhere."""

import asyncio
from collections.abc import Iterator

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest
from rl_bridge.errors import UnknownUpdate, WeightUpdateRejectedError
from rl_bridge.remote import RemoteWeightLoader
from rl_bridge.strategies import AbandonedWeightUpdateRequest, SharedMemoryWeightUpdateRequest
from rl_bridge.strategies.requests import columns_of
from tests.helpers import weights
from tests.remote.process import SidecarProcess


@pytest.fixture
def loader(shared: SidecarProcess) -> Iterator[RemoteWeightLoader]:
    with shared.client() as engine:
        yield RemoteWeightLoader(engine)


def requests(manifest: WeightUpdateManifest) -> list[SharedMemoryWeightUpdateRequest]:
    """One tensor in each."""
    names = list(manifest.table.rows)
    made = []
    for number, name in enumerate(names):
        made.append(
            SharedMemoryWeightUpdateRequest(
                update_id=manifest.update_id,
                weight_version=manifest.weight_version,
                batch=number,
                num_batches=len(names),
                manifest=None if number else manifest.to_json(),
                **columns_of(manifest, (name,)),
            )
        )
    return made


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(weights(version), weight_version=version)


def load(loader: RemoteWeightLoader, made: list[SharedMemoryWeightUpdateRequest]) -> None:
    async def all_of_them() -> None:
        for request in made:
            await loader.load_weights(None, request)

    asyncio.run(all_of_them())


def test_the_last_batch_installs_the_update(
    loader: RemoteWeightLoader, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    *some, last = requests(manifest)
    load(loader, some)
    with pytest.raises(UnknownUpdate):
        loader.engine.update(manifest)
    load(loader, [last])
    assert loader.engine.status().active_root == manifest.root
    loader.check_servable()


def test_an_update_that_ended_takes_no_more_batches(
    loader: RemoteWeightLoader, trainer: TensorBridge
) -> None:
    first, second, *rest = requests(publish(trainer, 1))
    load(loader, [first])
    with pytest.raises(WeightUpdateRejectedError, match="expected batch 1"):
        load(loader, [rest[0]])
    for late in (second, *rest):
        with pytest.raises(UnknownUpdate, match="Send the update again from its first batch"):
            load(loader, [late])


def test_an_update_that_its_trainer_gave_up_is_forgotten(
    loader: RemoteWeightLoader, trainer: TensorBridge
) -> None:
    first, second, *_ = requests(publish(trainer, 1))
    load(loader, [first])
    given_up = AbandonedWeightUpdateRequest(
        update_id=first.update_id, weight_version=1, reason="another engine failed"
    )
    asyncio.run(loader.load_weights(None, given_up))
    with pytest.raises(UnknownUpdate):
        load(loader, [second])
