"""What a version consists of: the manifest, its tensors, its layout and its digests."""

from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.digest import digest_bytes
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import WeightLayout
from rl_bridge.manifest.table import TensorDescriptor

__all__ = [
    "AdapterSpec",
    "Policy",
    "TensorDescriptor",
    "WeightLayout",
    "WeightUpdateManifest",
    "digest_bytes",
]
