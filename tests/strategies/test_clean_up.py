"""What follows a sync: one order, every step, and all ranks learn what became of it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge.errors import GroupAborted
from rl_bridge.groups.exchange import GroupExchange, StoreExchange
from rl_bridge.strategies.sender import STEPS, CleanUp, HelperTransferSender, cuda_calls
from tests.strategies.rig import Rig, chunks_of, rig, run, weights


class Device:
    """Notes what it is asked."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def ipc_collect(self) -> None:
        self.order.append("ipc_collect")

    def synchronize(self) -> None:
        self.order.append("synchronize")

    def empty_cache(self) -> None:
        self.order.append("empty_cache")


class Alone(GroupExchange):
    """One rank that notes its barriers."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(0, 1)
        self.order = order

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.order.append("barrier")
        return [payload]


def exchanges(num: int) -> list[StoreExchange]:
    store = torch._C._distributed_c10d.HashStore()
    return [StoreExchange(store, rank=rank, world_size=num) for rank in range(num)]


def together(*tasks: Callable[[], Any]) -> list[Any]:
    def caught(task: Callable[[], Any]) -> Any:
        try:
            return task()
        except Exception as error:  # noqa: BLE001 - looked at below
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(caught, tasks))


def test_the_steps_are_taken_in_the_documented_order() -> None:
    order: list[str] = []

    async def reset() -> None:
        order.append("reset_prefix_cache")

    clean_up = CleanUp(device=Device(order), exchange=Alone(order))
    done = run(clean_up.run("", delete=lambda: order.append("delete"), reset_prefix_cache=reset))
    assert tuple(order) == done == STEPS


def test_a_step_that_fails_does_not_keep_the_others_from_being_taken() -> None:
    order: list[str] = []
    device = Device(order)

    def broken() -> None:
        raise RuntimeError("the driver is gone")

    device.ipc_collect = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the driver is gone"):
        run(
            CleanUp(device=device, exchange=Alone(order)).run(
                "", delete=lambda: order.append("delete")
            )
        )
    assert order == ["delete", "barrier", "synchronize", "empty_cache"]


def test_engines_are_loaded_before_the_clean_up_and_caches_dropped_last() -> None:
    order: list[str] = []
    with rig(threshold_nbytes=320) as r:
        r.sender._clean_up = CleanUp(device=Device(order), exchange=Alone(order))
        load = r.engine.load

        def noted(pairs: list[tuple[str, torch.Tensor]]) -> None:
            order.append("load")
            load(pairs)

        async def reset() -> None:
            order.append("reset_prefix_cache")

        r.loader.executor.weight_install_adapter._load = noted  # type: ignore[union-attr]
        r.client.reset_prefix_cache = reset  # type: ignore[attr-defined]
        r.sync(1)
        assert order == ["load"] * 3 + [one for one in STEPS if one != "delete"]
        order.clear()
        r.engine.fails_at = 3
        with pytest.raises(RuntimeError, match="the engine's loader failed"):
            r.sync(2)
        # Nothing was installed, so nothing that the engines cached is wrong.
        assert "reset_prefix_cache" not in order
        assert "empty_cache" in order


def help_with(helper: HelperTransferSender, version: int, r: Rig) -> Any:
    return run(helper.send_chunks(chunks_of(weights(version)), r.client))


def test_helper_ranks_return_when_the_engines_have_the_update() -> None:
    here, there = exchanges(2)
    with rig() as r:
        r.sender._clean_up = CleanUp(exchange=here, timeout_s=20)
        helper = HelperTransferSender(CleanUp(exchange=there, timeout_s=20))
        for version in (1, 2, 3):
            manifest, nothing = together(
                partial(r.sync, version),
                partial(help_with, helper, version, r),
            )
            assert nothing is None
            assert manifest.weight_version == version - 1
            assert r.engine.holds(version)


def test_helper_ranks_learn_that_a_sync_failed_and_why() -> None:
    here, there = exchanges(2)
    with rig() as r:
        r.sender._clean_up = CleanUp(exchange=here, timeout_s=20)
        helper = HelperTransferSender(CleanUp(exchange=there, timeout_s=20))
        r.engine.fails_at = 0
        mine, others = together(
            lambda: r.sync(1),
            lambda: run(helper.send_chunks(chunks_of(weights(1)), r.client)),
        )
        assert isinstance(mine, RuntimeError)
        assert "the engine's loader failed" in str(mine)
        assert isinstance(others, GroupAborted)
        assert others.ranks == (0,)
        assert "the engine's loader failed" in str(others)
        r.engine.fails_at = None
        done, _ = together(
            lambda: r.sync(2),
            lambda: run(helper.send_chunks(chunks_of(weights(2)), r.client)),
        )
        assert r.engine.holds(2), done


def test_a_rank_that_never_comes_ends_the_wait_within_the_deadline() -> None:
    here, _ = exchanges(2)
    done = threading.Event()

    def sync() -> None:
        helper = HelperTransferSender(CleanUp(exchange=here, timeout_s=0.2))
        with pytest.raises(GroupAborted), rig() as r:
            run(helper.send_chunks(chunks_of(weights(1)), r.client))
        done.set()

    thread = threading.Thread(target=sync)
    thread.start()
    thread.join(30)
    assert done.is_set()


def test_only_a_gpu_has_something_to_clean_up() -> None:
    assert cuda_calls("cpu") is None
    assert cuda_calls("cuda:1") is torch.cuda


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        CleanUp(timeout_s=0)
