"""The demo: a small policy learns to sort while its weights travel over the bridge.

Read `run` first, which starts the two halves; then `trainer` (publishes, plants three faults, and
judges what the rollout holds) and `rollout` (installs, samples). `learning` and `model` are the
reinforcement learning, `report` is what one sees. `stored` has a store between the
halves, and kills the trainer. Real engines in the torch module's place are in `vllm_engine` and
`sglang_engine`; they share `qwen`.
"""

from rl_bridge.demo.report import DemoResult
from rl_bridge.demo.run import run_demo

__all__ = ["DemoResult", "run_demo"]
