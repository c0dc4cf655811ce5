"""Two drivers of one SGLang engine: one that was overtaken says nothing of the other's version."""

from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightUpdateRejectedError
from rl_bridge.integrations.sglang import rank
from rl_bridge.integrations.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.integrations.sglang.handles import Answer, EngineHandle
from rl_bridge.integrations.sglang.plugin import PREFIX
from tests.integrations.test_sglang_comes_again import Engine, engine, trainer
from tests.integrations.test_sglang_exchange import equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


class Handle(EngineHandle):
    """One driver's, of an engine that several have."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(20)
        self._engine = engine

    def ask(self, route: str, **body: Any) -> tuple[bool, Any]:
        if route == "update_weight_version":
            self._engine.label = body["new_version"]
        if route != "get_weights_by_name":
            return True, ""
        text = body["name"].removeprefix(PREFIX)
        return True, list(rank.answer(self._engine.model, lambda: True, text).encode())

    def flush(self) -> Answer:
        return True, ""

    def label(self) -> str:
        return self._engine.label

    def model_path(self) -> str:
        return ""


def test_a_driver_that_stood_still_behind_its_install_says_nothing_of_its_successors_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = (trainer.publish(version(n), weight_version=n) for n in (1, 2))
    late, successor = (SGLangInstallAdapter(Handle(engine)) for _ in range(2))
    late.prepare(mine, {})
    late.install(mine, {})
    successor.prepare(theirs, {})
    successor.install(theirs, {})
    successor.resume()
    successor.commit()
    with pytest.raises(WeightUpdateRejectedError, match="another driver came in between"):
        late.resume()
    late.undo()
    assert equal(held(engine.model), loaded(2))
    assert engine.label == f"2@{theirs.root}"


def test_a_driver_that_gives_up_takes_back_no_other_drivers_install_of_the_same_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    late, successor = (SGLangInstallAdapter(Handle(engine)) for _ in range(2))
    late.prepare(manifest, {})
    successor.prepare(manifest, {})
    successor.install(manifest, {})
    with pytest.raises(WeightUpdateRejectedError, match="not prepared here by this driver"):
        late.commit()
    late.undo()
    successor.resume()
    successor.commit()
    assert equal(held(engine.model), loaded(1))
