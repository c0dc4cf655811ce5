"""Trainer side: from a model, however it is sharded, to named tensors.

An extractor's metadata and placements come first, without bytes and without asking another rank;
then chunks, of what this rank holds (`local`) or of whole tensors (`full`, `extract_weights`).
"""

from rl_bridge.trainers.base import RankTensor, WeightExtractor, WeightMetadata
from rl_bridge.trainers.checkpoint_files import read_peft, write_peft
from rl_bridge.trainers.chunks import WeightChunk
from rl_bridge.trainers.deepspeed import DeepSpeedWeightExtractor
from rl_bridge.trainers.fsdp import FSDPWeightExtractor
from rl_bridge.trainers.megatron import MegatronWeightExtractor
from rl_bridge.trainers.state_dict import Source, StateDictExtractor, named_tensors

__all__ = [
    "DeepSpeedWeightExtractor",
    "FSDPWeightExtractor",
    "MegatronWeightExtractor",
    "RankTensor",
    "Source",
    "StateDictExtractor",
    "WeightChunk",
    "WeightExtractor",
    "WeightMetadata",
    "named_tensors",
    "read_peft",
    "write_peft",
]
