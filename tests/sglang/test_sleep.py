"""An engine that released its weights' memory takes no update, and then serves none of ours.

SGLang releases no memory on a CPU, so a fault stands in for what its memory saver does.
"""

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import EngineAsleep
from tests.sglang.bench import WAYS, Bench, executor_for


@pytest.mark.parametrize(("route", "staging"), [way for way in WAYS if way[0] == "import"])
def test_weights_whose_memory_was_released_are_not_servable_until_they_are_installed_again(
    route: str, staging: str, bench: Bench
) -> None:
    with executor_for(bench.engine, route=route, staging=staging) as executor:
        bench.plant("sleep")
        bench.update(executor)
        bench.engine.release_memory_occupation()
        following = bench.publish()
        for call in (executor.check_servable, lambda: executor.update_weights(following)):
            with pytest.raises(EngineAsleep, match="Wake it first, its weights at least"):
                call()
        bench.engine.resume_memory_occupation(tags=["weights"])
        with pytest.raises(WeightBridgeUnavailableError, match="threw its weights away to sleep"):
            executor.check_servable()
        executor.update_weights(following)
        bench.engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
        bench.holds = 1 - bench.holds
        executor.check_servable()
        bench.uproot()
        bench.check()
