"""Two drivers of one engine: what one is refused takes nothing of the other's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import RolloutExecutor, TornEngine, WeightUpdateManifest, WeightUpdateRejectedError
from rl_bridge.engines.sglang.routes import RouteName
from tests.sglang.bench import Bench, executor_for
from tests.sglang.test_equal import folder

# The call by which a route's bytes come in.
LOADS: dict[RouteName, str] = {
    "tensor": "update_weights_from_tensor",
    "distributed": "update_weights_from_distributed",
    "disk": "update_weights_from_disk",
}


def before(executor: RolloutExecutor, route: str, first: Callable[[], object]) -> None:
    """Do something right before a driver's first call of that route."""
    handle: Any = executor.weight_install_adapter._handle  # type: ignore[union-attr]
    ask, left = handle.ask, [first]

    def come_in(asked: str, **body: Any) -> tuple[bool, Any]:
        if asked == route and left:
            left.pop()()
        done: tuple[bool, Any] = ask(asked, **body)
        return done

    handle.ask = come_in


def is_paused(bench: Bench) -> bool:
    return bool(bench.engine.tokenizer_manager.is_pause)


def label(bench: Bench) -> str:
    return str(bench.engine.tokenizer_manager.config_value("weight_version"))


def name(manifest: WeightUpdateManifest) -> str:
    return f"{manifest.weight_version}@{manifest.root}"


def test_a_driver_whose_update_another_one_committed_leaves_no_pause(bench: Bench) -> None:
    manifest = bench.trainer.publish(bench.next())
    with executor_for(bench.engine) as late, executor_for(bench.engine) as successor:
        adapter: Any = late.weight_install_adapter
        install = adapter.install

        def overtaken(*given: Any) -> None:
            successor.update_weights(manifest)
            install(*given)

        adapter.install = overtaken
        with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
            late.update_weights(manifest)
        late.recover()
        assert not is_paused(bench)
        bench.holds = 1 - bench.holds
        bench.check()
        assert label(bench) == name(manifest)


@pytest.mark.parametrize("route", LOADS)
def test_a_driver_that_is_refused_does_not_end_anothers_pause(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    mine, theirs = (bench.trainer.publish(bench.weights[n]) for n in (bench.holds, 1 - bench.holds))
    options = {"route": route, "directory": folder(route, tmp_path)}
    with executor_for(bench.engine) as late, executor_for(bench.engine, **options) as other:
        adapter: Any = late.weight_install_adapter

        def come_too_late() -> None:
            with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
                adapter.install(mine, {})
            adapter.undo()
            assert is_paused(bench), "in the middle of another driver's load"

        adapter.prepare(mine, {})
        before(other, LOADS[route], come_too_late)
        other.update_weights(theirs)
        bench.holds = 1 - bench.holds
        assert not is_paused(bench)
        bench.check()


@pytest.mark.parametrize("route", LOADS)
def test_a_load_that_comes_behind_another_drivers_update_is_not_let_in(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    """It would write over what the other one has proven, and nobody would look again."""
    theirs, mine = (bench.trainer.publish(bench.weights[n]) for n in (bench.holds, 1 - bench.holds))
    options = {"route": route, "directory": folder(route, tmp_path)}
    with executor_for(bench.engine, **options) as late, executor_for(bench.engine) as successor:
        # Behind its begin, and before the session that a successor would end.
        first = LOADS[route] if route == "disk" else "begin_weight_update"
        before(late, first, lambda: successor.update_weights(theirs))
        with pytest.raises(TornEngine, match="another driver came in between"):
            late.update_weights(mine)
        assert not is_paused(bench)
        bench.check()
        assert label(bench) == name(theirs)
        later = bench.update(late)
        bench.check()
        assert label(bench) == name(later)
