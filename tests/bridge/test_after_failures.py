"""After a failure: what can be let go is let go, and interrupts come out."""

import logging
from typing import Any

import pytest
import torch

from rl_bridge import (
    InstallProof,
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import MalformedManifest, ProofFailed, TornEngine
from rl_bridge.installers.wrapped import as_transactional
from rl_bridge.lifecycle import State
from rl_bridge.memory.passes import BytePlan
from tests.bridge.engines import Recording, SeedStyle, Unseen, bridge_of, content, publish
from tests.helpers import weights

# ---- what comes before an active version is let go, whatever the adapter does -------------------


class Failing(Recording):
    """Fails in one step, always, after it has noted the call."""

    def __init__(self, engine: dict[str, torch.Tensor], step: str) -> None:
        super().__init__(engine)
        self.failing = step

    def _step(self, name: str) -> None:
        super()._step(name)
        if name.startswith(self.failing):
            msg = "the engine said no"
            raise OSError(msg)


@pytest.mark.parametrize("step", ["commit", "release"])
def test_an_adapter_that_cannot_let_go_does_not_block_the_publisher(
    step: str,
    publisher: TensorBridge,
    consumer: TensorBridge,
    engine: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # What is told would be kept by pytest, with the frames of each exception and their tensors.
    caplog.set_level(logging.CRITICAL, logger="rl_bridge")
    adapter = Failing(engine, step)
    executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
    before: WeightUpdateManifest | None = None
    for version in range(1, 13):
        manifest = publish(publisher, version)
        executor.update_weights(manifest)
        if before is not None:
            assert consumer.update_status(before.update_id) == "released"
            assert adapter.calls[-1] == f"release {before.update_id[:4]}"
        publisher.release(manifest.update_id)
        before = manifest
    assert content(engine) == content(weights(12))


def test_a_commit_that_fails_does_not_leave_an_earlier_update_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    torn = publish(publisher, 1)
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    with pytest.raises(TornEngine):
        executor.update_weights(torn)
    adapter.fails = {"commit": OSError("no")}
    executor.update_weights(publish(publisher, 2))
    assert not executor.is_torn
    assert bridge_of(executor).update_state(torn.update_id) is State.REJECTED


def test_a_release_that_the_adapter_refuses_is_told_and_done(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    own = LookupError("the engine said no")
    adapter.fails[f"release {manifest.update_id[:4]}"] = own
    with pytest.raises(LookupError) as caught:
        executor.release_weights()
    assert caught.value is own
    assert bridge_of(executor).update_status(manifest.update_id) == "released"
    assert executor.active_weight_update_id is None


class OnlyInstalls:
    release = "no function"

    def install(self, manifest: object, tensors: object) -> None:
        """Would install."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OnlyInstalls(), "OnlyInstalls has no release. An adapter needs install"),
        (object(), "object has no install and no release"),
    ],
    ids=["no-release", "nothing"],
)
def test_an_adapter_without_its_two_verbs_is_refused_at_once(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        RolloutExecutor(weight_transport="local", weight_install_adapter=given)


# ---- interrupts, and what is no manifest --------------------------------------------------------


def test_what_stops_an_undo_comes_out_and_the_engine_is_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    own = LookupError("no")
    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    adapter.fails = {"install": own, "undo": SystemExit(3)}
    with pytest.raises(SystemExit) as caught:
        executor.update_weights(manifest)
    assert caught.value.code == 3
    assert "stopped the undo of version 2; the engine is torn" in caught.value.__notes__[0]
    assert caught.value.__context__ is own
    assert executor.is_torn
    assert bridge_of(executor).update_state(manifest.update_id) is State.TORN
    adapter.fails = {}
    executor.recover()
    assert content(adapter.engine) == content(weights(1))


@pytest.mark.parametrize(
    "given", [None, 5, {"update_id": "x"}, object()], ids=lambda one: type(one).__name__
)
def test_what_is_no_manifest_is_malformed_for_the_executor_too(
    given: Any, executor: RolloutExecutor, adapter: Recording
) -> None:
    with pytest.raises(MalformedManifest, match=r"update_weights got a .*Pass what publish"):
        executor.update_weights(given)
    assert adapter.calls == []


def test_a_failed_proof_says_what_was_found_and_not_what_became_of_the_engine(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    adapter.proof = InstallProof(method="digest", root="0" * 32)
    with pytest.raises(ProofFailed) as caught:
        executor.update_weights(publish(publisher, 1))
    assert "undone" not in str(caught.value)
    assert caught.value.__notes__[0].startswith("rl_bridge: version 1 was undone")


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "wrapped", "unseen"])
def test_no_pass_takes_more_threads_than_it_was_given(
    mode: str,
    publisher: TensorBridge,
    engine: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: set[object] = set()
    run = BytePlan._run

    def counting(plan: BytePlan, *args: Any, num_threads: int | None, **kwargs: Any) -> bytes:
        given.add(num_threads)
        return run(plan, *args, num_threads=num_threads, **kwargs)

    adapters: dict[str, Any] = {
        "copy": lambda: ModuleInstallAdapter(engine, num_threads=1),
        "wrapped": lambda: SeedStyle(engine),
        "unseen": lambda: Unseen(engine),
    }
    adapter = adapters[mode]()
    with make_weight_bridge(publisher.transport, num_threads=1) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, num_threads=1
        )
        manifests = [publish(publisher, version) for version in (1, 2)]
        executor.update_weights(manifests[0])
        install = adapter.install

        def fails(*args: Any) -> None:
            install(*args)
            adapter.install = install
            msg = "the engine said no"
            raise LookupError(msg)

        adapter.install = fails
        monkeypatch.setattr(BytePlan, "_run", counting)
        with pytest.raises(LookupError):
            executor.update_weights(manifests[1])
        assert given == {1}
        assert content(engine) == content(weights(1))


@pytest.mark.parametrize("num_threads", [0, -3, 1.5, True], ids=repr)
def test_less_than_one_thread_is_refused(num_threads: Any, engine: dict[str, torch.Tensor]) -> None:
    said = f"num_threads {num_threads!r}: expected an int of 1"
    with pytest.raises(ValueError, match=said):
        ModuleInstallAdapter(engine, num_threads=num_threads)
    for adapter in (SeedStyle(engine), ModuleInstallAdapter(engine)):
        with pytest.raises(ValueError, match=said):
            as_transactional(adapter, num_threads=num_threads)
