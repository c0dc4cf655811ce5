"""What ranks tell each other is judged before it is believed, and whoever said it is named."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge.errors import GroupAborted
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.digest import LEAF_NBYTES
from tests.groups.meshes import cut, model
from tests.groups.rig import HashStore, Trainers, everywhere, trainers

# Each rank has one leaf: the whole digest is made of both leaf lists.
SHARDS = cut(model({"w": (2 * LEAF_NBYTES // 4,)}), 2, {"w": 0})


class Twisted(StoreExchange):
    """A rank that says something else in one step."""

    def __init__(self, store: HashStore, step: str, twist: Callable[[bytes], bytes]) -> None:
        super().__init__(store, rank=1, world_size=2)
        self._step, self._twist = step, twist

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        said = self._twist(payload) if step == self._step else payload
        return super().gather(step, said, timeout_s=timeout_s)


def published(group: Trainers, step: str, twist: Callable[[bytes], bytes]) -> list[Any]:
    """What each rank gets when rank 1 says something else in one step."""
    store = HashStore()
    exchanges = [StoreExchange(store, rank=0, world_size=2), Twisted(store, step, twist)]

    def one(rank: int) -> object:
        publisher = GroupPublisher(group.bridges[rank], exchanges[rank], timeout_s=20.0)
        return publisher.publish(*SHARDS[rank], weight_version=1)

    return everywhere([lambda: one(0), lambda: one(1)])


def without(key: str) -> Callable[[bytes], bytes]:
    return lambda said: json.dumps({k: v for k, v in json.loads(said).items() if k != key}).encode()


def with_(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda said: json.dumps({**json.loads(said), **changes}).encode()


def text_behind(said: bytes) -> bytes:
    return with_(placements=json.loads(said)["placements"] + "x")(said)


SAID: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "no json": ("hello", lambda _: b"\xff", "is no JSON"),
    "a nest": ("hello", lambda _: b"[" * 100_000, "is no JSON"),
    "a list": ("hello", lambda _: b"[]", "is a list"),
    "no hello": ("hello", lambda _: b"{}", "rank 1 sent something that is no hello"),
    "a true rank": ("hello", with_(rank=True), "is no hello"),
    "other placements": ("hello", with_(placements="0" * 32), "rank 1 named other placements"),
    "text behind": ("placements", text_behind, "rank 1 named other placements"),
    "no placements": ("placements", without("placements"), "rank 1 named other placements"),
    "no part": ("parts", without("part"), "rank 1 sent something that is no part"),
    "a number as part": ("parts", with_(part=7), "is no part"),
    "no manifest": ("parts", with_(part="{}"), "the part of rank 1 cannot be read"),
    "no leaves": ("parts", without("leaves"), "is no part"),
    "no base64": ("parts", with_(leaves="!"), "the part of rank 1 cannot be read"),
    "too few leaves": ("parts", with_(leaves="AAAA"), "the part of rank 1 cannot be read"),
}


@pytest.mark.parametrize("case", list(SAID))
def test_a_malformed_message_aborts_all_ranks_and_names_its_sender(case: str) -> None:
    step, twist, words = SAID[case]
    with trainers(2) as group:
        for one in published(group, step, twist):
            assert isinstance(one, GroupAborted), one
            assert words in str(one)
            assert one.ranks == (1,)
        for bridge in group.bridges:
            latest = bridge.latest_manifest
            assert latest is None or bridge.update_status(latest) == "released"


def test_a_leaf_list_that_is_not_sent_makes_no_digest() -> None:
    with trainers(2) as group:
        for one in published(group, "parts", with_(leaves=None)):
            assert "the leaf list of rank 1 is missing" in str(one)


def test_versions_may_be_integers_of_numpy_and_torch() -> None:
    with trainers(2) as group:
        for version in (np.int64(3), torch.tensor(4)):
            manifest = group.publish(SHARDS, version)  # type: ignore[arg-type]
            assert manifest.weight_version == int(version)
