"""G3 Atomic: an engine holds version N entirely or version M entirely, never a mixture.

Whatever fails and whenever: whenever `update_weights` is not running, the engine holds exactly the
version that the executor reports.

It ends at an engine that runs while it is changed: give `quiesce=` where a request may run during
an install. It ends at a torn engine (install and undo both failed): that one is marked, and refuses
to serve. It ends at `strict=False`, with which the caller vouches for what updates leave out.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import (
    IncompatibleUpdate,
    StaleUpdate,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing import (
    Child,
    ChildDied,
    KillAt,
    Peer,
    Stage,
    bytes_of,
    hashes,
    sample_engine,
    sample_weights,
)
from tests.guarantees.kit import ADAPTERS, Replica, engine_tensors


def test_version_after_version_the_engine_holds_what_was_published(replica: Replica) -> None:
    for number in range(1, 7):
        acknowledgement = replica.update(number)
        assert replica.holds(number)
        assert replica.version == acknowledgement.weight_version
        replica.executor.check_servable()


@pytest.mark.parametrize("stage", Stage)
def test_an_update_that_fails_leaves_the_engine_at_the_version_it_had(
    replica: Replica, stage: Stage
) -> None:
    replica.require(stage)
    before = replica.update(1).weight_version
    for number in (2, 4):
        replica.fail_next(stage)
        with pytest.raises(replica.fault):
            replica.update(number)
        assert replica.holds(1)
        assert replica.version == before
        replica.executor.check_servable()
    replica.mend()
    assert replica.update(2).weight_version == replica.version
    assert replica.holds(2)


def test_an_update_that_does_not_fit_touches_nothing(replica: Replica) -> None:
    if not replica.can_refuse:
        pytest.skip("an adapter without prepare() cannot refuse before it begins")
    before = replica.update(1).weight_version
    weights = replica.weights(2)
    name, matrix = next((n, it) for n, it in weights.items() if it.dim() == 2 and it.numel())
    for changed in ({name: matrix[1:]}, {name: matrix.int()}, {"no.such": torch.ones(3)}):
        manifest = replica.publish(2, **changed)
        with pytest.raises(IncompatibleUpdate):
            replica.executor.update_weights(manifest)
        assert replica.holds(1)
        assert replica.version == before


def test_an_engine_whose_undo_fails_too_is_torn_and_does_not_serve(replica: Replica) -> None:
    replica.require_torn()
    before = replica.update(1).weight_version
    replica.fail_next(Stage.HALF_WAY, undo_too=True)
    with pytest.raises(TornEngine):
        replica.update(2)
    assert replica.executor.is_torn
    assert replica.executor.active_weight_version is None
    with pytest.raises(TornEngine):
        replica.executor.check_servable()
    replica.mend()
    replica.executor.recover()
    assert replica.version == before
    assert replica.holds(1)


def test_a_later_version_in_full_mends_a_torn_engine(replica: Replica) -> None:
    replica.require_torn()
    replica.update(1)
    replica.fail_next(Stage.HALF_WAY, undo_too=True)
    with pytest.raises(TornEngine):
        replica.update(2)
    replica.mend()
    replica.update(4)
    assert replica.holds(4)
    replica.executor.check_servable()


# ---- whenever: interrupts, threads, deaths ------------------------------------------------------


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """A real SIGINT at that moment, if the body still runs then."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_ctrl_c_at_any_moment_leaves_one_version_or_the_other(replica: Replica) -> None:
    held = 1
    took = replica.update(held).timings_ms["total"] / 1e3
    for moment in range(1, 25):
        number = 3 - held
        manifest = replica.publish(number)
        with suppress(KeyboardInterrupt), ctrl_c_after(took * moment / 20):
            replica.executor.update_weights(manifest)
        replica.executor.recover()  # ends what a second Ctrl-C would leave torn; else does nothing
        held = number if replica.version == manifest.weight_version else held
        assert replica.holds(held)
        replica.executor.check_servable()


def test_threads_that_update_one_engine_take_turns(replica: Replica) -> None:
    manifests = {replica.publish(number): number for number in (1, 2)}
    threads = [
        threading.Thread(target=_update_quietly, args=(replica.executor, manifest))
        for manifest in manifests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    numbers = {manifest.weight_version: number for manifest, number in manifests.items()}
    assert replica.holds(numbers[replica.version or 0])


def _update_quietly(executor: RolloutExecutor, manifest: WeightUpdateManifest) -> None:
    with suppress(StaleUpdate):  # where the later version came first
        executor.update_weights(manifest)


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


# ---- requests -----------------------------------------------------------------------------------


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
