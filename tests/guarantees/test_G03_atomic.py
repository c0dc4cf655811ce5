"""G3 Atomic: an engine holds version N entirely or version M entirely, never a mixture.

Whatever fails and whenever: whenever `update_weights` is not running, the engine holds exactly the
version that the executor reports.

It ends at an engine that runs while it is changed: give `quiesce=` where a request may run during
an install. It ends at a torn engine (install and undo both failed): that one is marked, and refuses
to serve. It ends at `strict=False`, with which the caller vouches for what updates leave out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.testing import (
    Child,
    ChildDied,
    KillAt,
    Peer,
    bytes_of,
    hashes,
    sample_engine,
    sample_weights,
)
from tests.guarantees.kit import ADAPTERS, OverEachAdapter, engine_tensors, scenarios


@scenarios(
    "test_version_after_version_the_engine_holds_what_was_published",
    "test_a_later_install_that_fails_leaves_the_version_before",
    "test_what_does_not_fit_is_refused_before_byte_0",
    "test_a_torn_engine_goes_back_to_before_it_was_torn",
    "test_a_later_version_in_full_mends_a_torn_engine",
    "test_a_ctrl_c_at_any_moment_leaves_one_version_or_the_other",
    "test_threads_that_update_one_engine_take_turns",
)
class TestEachAdapter(OverEachAdapter):
    """Whatever fails and whenever, interrupts and threads too."""


@pytest.mark.parametrize("event", ["import", "verify", "stage", "install", "acknowledge"])
def test_an_engine_killed_at_any_step_starts_anew_with_a_whole_version(event: str) -> None:
    with make_weight_bridge("shared-memory", suspicious="off") as trainer:
        first, second = (
            trainer.publish(sample_weights(version), weight_version=version).to_json()
            for version in (1, 2)
        )
        made = {"transport_class": "shared-memory", "transport_kwargs": {}, "engine_seed": 0}
        with Child(Peer, **made, observer=KillAt(event, weight_version=2)) as victim:
            victim.call("update_weights", manifest=first)
            with pytest.raises(ChildDied):
                victim.call("update_weights", manifest=second)
        with Child(Peer, **made) as successor:
            assert successor.call("update_weights", manifest=second) == 2
            assert successor.call("engine") == hashes(sample_weights(2))


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_the_engine_is_changed_only_while_it_is_quiesced(mode: Any) -> None:
    engine, looks = sample_engine(), []

    def weights() -> dict[str, bytes]:
        return {name: bytes_of(tensor) for name, tensor in engine_tensors(engine).items()}

    @contextmanager
    def quiesce() -> Iterator[None]:
        looks.append(weights())
        yield
        looks.append(weights())

    adapter = ModuleInstallAdapter(engine, mode=mode, quiesce=quiesce)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        initial = weights()
        executor.update_weights(bridge.publish(sample_engine(seed=6), weight_version=1))
        assert looks == [initial, weights()]
        assert initial != weights()


def test_an_engine_without_a_verified_version_does_not_serve() -> None:
    adapter = ADAPTERS["copy"](sample_engine())
    with (
        RolloutExecutor(weight_install_adapter=adapter) as executor,
        pytest.raises(WeightBridgeUnavailableError),
    ):
        executor.check_servable()
