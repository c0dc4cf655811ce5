"""The suite's hook for engines that store their weights in another way than updates bring them."""

import pytest
import torch

from rl_bridge.installers.base import Engine
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import InstallerSuite
from rl_bridge.testing.installer_faults import EngineFault, Stage
from rl_bridge.testing.installer_suite import MakeRig, engine_state

WIDTH = 6


class Fused(torch.nn.Module):
    """Rows of q, then of k, then of v in one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, 2, bias=False)


def apart(engine: Engine) -> dict[str, torch.Tensor]:
    """The engine's memory under the trainer's names."""
    assert isinstance(engine, Fused)
    named = {"o.weight": engine.out.weight.detach()}
    for part in ("weight", "bias"):
        fused = getattr(engine.qkv, part).detach()
        named |= {f"{name}.{part}": rows for name, rows in zip("qkv", fused.chunk(3), strict=True)}
    return named


class TestFusedWeights(InstallerSuite):
    """Copy mode over a dict of views keeps every promise."""

    def make_engine(self) -> Engine:
        return Fused()

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(apart(engine), mode="copy")

    def published(self, engine: Engine) -> dict[str, torch.Tensor]:
        return apart(engine)

    def test_the_suite_publishes_the_trainers_names(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.weights(1).keys() == {
            "o.weight",
            *(f"{name}.{part}" for name in "qkv" for part in ("weight", "bias")),
        }

    def test_half_way_the_engine_is_changed(self, make_rig: MakeRig) -> None:
        """Else an undo that does nothing would pass."""
        rig = make_rig()
        before = engine_state(rig.engine)
        changed = []

        def look() -> None:
            changed.append(engine_state(rig.engine) != before)
            raise EngineFault("as planned")

        rig.sabotage.plan(Stage.HALF_WAY, 1, action=look)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(1))
        assert changed == [True]
        assert engine_state(rig.engine) == before
