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

# The call by which a route's bytes come in.
LOADS: dict[RouteName, str] = {
    "tensor": "update_weights_from_tensor",
    "distributed": "update_weights_from_distributed",
    "disk": "update_weights_from_disk",
}
NAMED = rf"driver .*process {os.getpid()} on .* has this engine"


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
def test_a_load_that_comes_behind_a_take_over_is_not_let_in(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    """It would write over what the other one has proven, and nobody would look again."""
    theirs, mine = (bench.trainer.publish(bench.weights[n]) for n in (bench.holds, 1 - bench.holds))
    with (
        executor_for(bench.engine, route=route, tmp_path=tmp_path) as late,
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
