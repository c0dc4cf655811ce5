"""An engine that is torn, and an interrupt or a release in the middle of saying so."""

import pytest

from rl_bridge import RolloutExecutor, TensorBridge
from rl_bridge.errors import TornEngine
from tests.bridge.engines import Recording, content, publish
from tests.helpers import weights


def broken() -> dict[str, BaseException]:
    """What an adapter fails with; made anew, as an exception that is kept keeps tensors."""
    return {"install": LookupError("the engine said no"), "undo": OSError("out of memory")}


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
