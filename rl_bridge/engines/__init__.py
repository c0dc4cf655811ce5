"""Inference engines in processes of their own, and what connects one more of them.

An engine supplies an `EngineClient`, by which its ranks are called, and in each rank a `RankHost`;
`EngineDriver` and `EngineRank` are the transaction. `rl_bridge.vllm` and `rl_bridge.sglang` are
the engines that are connected already.
"""

from rl_bridge.engines.driver import EngineDriver, Loader
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.rank import EngineRank, RankHost, RankInstaller, answer, rank_of
from rl_bridge.engines.rpc import EngineClient, RankGroup, Replies, Reply, in_thread, lost, watch
from rl_bridge.engines.serving import LabelMaker, ServingOptions, default_label
from rl_bridge.engines.shards import Shard, check_covered, parse_shards, part_digests
from rl_bridge.engines.skeleton import EngineCompat

__all__ = [
    "EngineClient",
    "EngineCompat",
    "EngineDriver",
    "EngineRank",
    "LabelMaker",
    "Loader",
    "ModelInstaller",
    "RankGroup",
    "RankHost",
    "RankInstaller",
    "Replies",
    "Reply",
    "ServingOptions",
    "Shard",
    "answer",
    "check_covered",
    "check_finite",
    "default_label",
    "in_thread",
    "lost",
    "parse_shards",
    "part_digests",
    "rank_of",
    "watch",
]
