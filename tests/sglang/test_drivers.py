"""Two drivers of one engine: the second is refused by name, and a killed one is taken over."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import RolloutExecutor
from rl_bridge.engines.sglang.loaders import RouteName
from rl_bridge.errors import SessionRefused
from tests.engines.stand import label_of
from tests.sglang.bench import Bench, executor_for
from tests.sglang.test_equal import folder

# The call by which a route's bytes come in.
LOADS: dict[RouteName, str] = {
    "tensor": "update_weights_from_tensor",
    "distributed": "update_weights_from_distributed",
    "disk": "update_weights_from_disk",
}
NAMED = rf"driver .*process {os.getpid()} on .* has this engine"


class KilledError(Exception):
    """The driver ends here."""


def before(executor: RolloutExecutor, route: str, first: Callable[[], object]) -> None:
    """Do something right before a driver's first call of that route."""
    client: Any = executor.weight_install_adapter._client  # type: ignore[union-attr]
    control, left = client.control, [first]

    def come_in(asked: str, **body: Any) -> tuple[bool, Any]:
        if asked == route and left:
            left.pop()()
        done: tuple[bool, Any] = control(asked, **body)
        return done

    client.control = come_in


def is_paused(bench: Bench) -> bool:
    return bool(bench.engine.tokenizer_manager.is_pause)


def label(bench: Bench) -> str:
    return str(bench.engine.tokenizer_manager.config_value("weight_version"))


@pytest.mark.parametrize("route", LOADS)
def test_what_a_killed_driver_did_not_prove_is_taken_back(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    def die() -> None:
        raise KilledError

    options: dict[str, Any] = {"route": route, "directory": folder(route, tmp_path)}
    with executor_for(bench.engine, **options) as dead:
        adapter: Any = dead.weight_install_adapter
        manifest, tensors = bench.trainer.publish(bench.next()), bench.next()
        adapter.prepare(manifest, tensors)
        before(dead, LOADS[route], die)
        with pytest.raises(KilledError):
            adapter.install(manifest, tensors)
        with executor_for(bench.engine) as executor:
            executor.recover()
            assert not is_paused(bench)
            bench.check()
            bench.update(executor)
            bench.check()


@pytest.mark.parametrize("route", LOADS)
def test_a_load_that_comes_behind_a_take_over_is_not_let_in(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    """It would write over what the other one has proven, and nobody would look again."""
    theirs, mine = (bench.trainer.publish(bench.weights[n]) for n in (bench.holds, 1 - bench.holds))
    options: dict[str, Any] = {"route": route, "directory": folder(route, tmp_path)}
    with (
        executor_for(bench.engine, **options) as late,
        executor_for(bench.engine, take_over=True) as successor,
    ):
        # Behind its begin, and before the session that a successor would end.
        first = LOADS[route] if route == "disk" else "begin_weight_update"
        before(late, first, lambda: successor.update_weights(theirs))
        with pytest.raises(SessionRefused, match="has this engine"):
            late.update_weights(mine)
        assert not is_paused(bench)
        bench.check()
        assert label(bench) == label_of(theirs)
        late.recover()
        later = bench.update(late)
        bench.check()
        assert label(bench) == label_of(later)
