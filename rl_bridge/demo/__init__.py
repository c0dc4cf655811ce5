"""The demo: a small policy learns to sort while its weights travel over the bridge.

Start with `run.run_demo`. Below it: `trainer` and `rollout` (with `rollout_process`, and with
`http_rollout` where server and side-car are processes of their own), `faults` (what is planted and
what must become of it), `task`, `model`, `sampler`, `learner` (the reinforcement learning),
`versions` (the judge), `live`, `report`, `picture` (what one sees).
"""

from rl_bridge.demo.records import DemoResult
from rl_bridge.demo.run import run_demo

__all__ = ["DemoResult", "run_demo"]
