"""An engine that is torn, and an interrupt or a release in the middle of saying so."""

from collections.abc import Iterator

import pytest

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import TornEngine
from rl_bridge.lifecycle import State
from tests.bridge.engines import InterruptAtLine, Recording, content, publish
from tests.helpers import tracing, weights


def broken() -> dict[str, BaseException]:
    """What an adapter fails with; made anew, as an exception that is kept keeps tensors."""
    return {"install": LookupError("the engine said no"), "undo": OSError("out of memory")}


class Rig:
    """An engine that version 2 tore, behind version 1; what is interrupted, comes next."""

    def __init__(self) -> None:
        self.trainer = make_weight_bridge("shared-memory", suspicious="off")
        self.bridge = make_weight_bridge("shared-memory", source_worker="rollout")
        self.adapter = Recording(weights(0))
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter, suspicious="off"
        )
        self.executor.update_weights(publish(self.trainer, 1))
        self.torn = publish(self.trainer, 2)
        self.adapter.fails = broken()
        with pytest.raises(TornEngine):
            self.executor.update_weights(self.torn)

    def interrupted(self, manifest: WeightUpdateManifest, number: int, file: str) -> bool:
        """Install a version and interrupt that before a line; False if it was over before."""
        tracer = InterruptAtLine(number, file)
        try:
            with tracing(tracer):
                self.executor.update_weights(manifest)
        except (KeyboardInterrupt, TornEngine):
            pass
        return tracer.struck

    def check_whole(self, version: int) -> None:
        """The engine is at that version, and of the one that tore it nothing is left."""
        assert not self.executor.is_torn
        assert self.executor.active_weight_version == self.bridge.active_weight_version == version
        assert content(self.adapter.engine) == content(weights(version))
        assert self.bridge.update_state(self.torn) is State.REJECTED
        (report,) = self.trainer.holders(self.torn)
        assert (report.state, report.tensors_held) == ("rejected", False)

    def close(self) -> None:
        for end in (self.executor, self.bridge, self.trainer):
            end.close()


def rigs() -> Iterator[tuple[Rig, int]]:
    number = 0
    while True:
        rig = Rig()
        try:
            yield rig, number
        except Exception as error:
            error.add_note(f"interrupted before line number {number}")
            raise
        finally:
            rig.close()
        number += 1


@pytest.mark.parametrize(("file", "least"), [("engine_state.py", 10), ("transaction.py", 40)])
def test_an_interrupt_in_a_version_that_heals_leaves_nothing_torn(file: str, least: int) -> None:
    for rig, number in rigs():
        rig.adapter.fails = {}
        struck = rig.interrupted(publish(rig.trainer, 3), number, file)
        rig.executor.recover()
        rig.check_whole(rig.executor.active_weight_version or 0)
        rig.executor.update_weights(publish(rig.trainer, 4))
        rig.check_whole(4)
        if not struck:
            break
    assert number > least


@pytest.mark.parametrize("file", ["engine_state.py", "transaction.py"])
def test_an_interrupt_in_a_second_try_that_tears_again_loses_nothing(file: str) -> None:
    for rig, number in rigs():
        struck = rig.interrupted(rig.torn, number, file)
        assert rig.executor.is_torn
        rig.adapter.fails = {}
        rig.executor.recover()
        rig.check_whole(1)
        if not struck:
            break
    assert number > 4


@pytest.mark.parametrize("is_healed_by_another", [False, True])
def test_an_update_that_is_released_meanwhile_tears_the_engine_all_the_same(
    is_healed_by_another: bool,
    publisher: TensorBridge,
    executor: RolloutExecutor,
    adapter: Recording,
) -> None:
    class Releasing(dict[str, BaseException]):
        """What fails; at the install, whoever shares the bridge releases the update as well."""

        def __contains__(self, step: object) -> bool:
            if step == "install":
                executor.bridge.release(manifest.update_id)
            return super().__contains__(step)

    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    adapter.fails = Releasing(broken())
    with pytest.raises(TornEngine, match=r"undo failed too .*call recover\(\)"):
        executor.update_weights(manifest)
    assert executor.is_torn
    adapter.fails = {}
    if is_healed_by_another:
        executor.update_weights(publish(publisher, 3))
    else:
        executor.recover()
    version = 3 if is_healed_by_another else 1
    assert executor.active_weight_version == version
    assert content(adapter.engine) == content(weights(version))
