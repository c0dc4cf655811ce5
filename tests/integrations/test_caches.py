"""What an update drops of an engine's caches. No vLLM is needed here."""

import pytest

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.engines.vllm.caches import CachePolicy
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, engine, trainer
from tests.integrations.test_rank import publish

__all__ = ["engine", "trainer"]


class Seeing(Engine):
    """An engine that keeps what it made of an image, and of a prompt."""

    def __init__(self, rank: VLLMRank) -> None:
        super().__init__(rank)
        self.media, self.prefixes = ["of the old weights"], ["of the old weights"]

    def reset_encoder_cache(self) -> None:
        self.media.clear()

    def reset_caches(self, *, running: bool) -> bool:
        del running
        self.reset_encoder_cache()
        self.prefixes.clear()
        return True


@pytest.mark.parametrize(("policy", "kept"), [("recompute", 0), ("reset", 0), ("keep", 1)])
def test_what_was_made_of_images_goes_even_where_prefixes_stay(
    engine: Engine, trainer: TensorBridge, policy: CachePolicy, kept: int
) -> None:
    seeing = Seeing(engine.rank)
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=VLLMEngineAdapter(seeing, cache=policy)
        ) as executor,
    ):
        executor.update_weights(publish(trainer, 1))
    assert (len(seeing.media), len(seeing.prefixes)) == (0, kept)
