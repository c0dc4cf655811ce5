"""Trainer side: from a model, however it is sharded, to named tensors.

The `*WeightExtractor`s gather whole tensors in chunks, for a strategy. The `*Extractor`s say what a
rank itself holds and where it belongs, for an update group: nothing is gathered.
"""

from rl_bridge.trainers.base import (
    RankTensor,
    WeightExtractor,
    WeightMetadata,
)
from rl_bridge.trainers.chunks import WeightChunk
from rl_bridge.trainers.deepspeed import (
    DeepSpeedExtractor,
    DeepSpeedWeightExtractor,
)
from rl_bridge.trainers.fsdp import (
    FSDPExtractor,
    FSDPWeightExtractor,
)
from rl_bridge.trainers.megatron import (
    MegatronExtractor,
    MegatronWeightExtractor,
)
from rl_bridge.trainers.state_dict import (
    Source,
    StateDictExtractor,
    named_tensors,
)

__all__ = [
    "DeepSpeedExtractor",
    "DeepSpeedWeightExtractor",
    "FSDPExtractor",
    "FSDPWeightExtractor",
    "MegatronExtractor",
    "MegatronWeightExtractor",
    "RankTensor",
    "Source",
    "StateDictExtractor",
    "WeightChunk",
    "WeightExtractor",
    "WeightMetadata",
    "named_tensors",
]
