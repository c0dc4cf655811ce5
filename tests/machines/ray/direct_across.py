"""A driver: tensors of Ray Direct Transport go from one node to the other, sealed and verified."""

import argparse
from typing import Any

import ray
import torch

from rl_bridge.ray import register_direct_transport

TIMEOUT_S = 90.0
NBYTES = 4 << 20
REFERENCES = 3


class Source:
    """Returns live tensors, and goes on writing to them."""

    def __init__(self) -> None:
        self.held = torch.zeros(NBYTES // 8, dtype=torch.int64)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self.held}

    def step(self) -> None:
        self.held += 1


class Taker:
    """Looks at what it is given."""

    def sum(self, weights: dict[str, torch.Tensor]) -> int:
        return int(weights["w"].sum())


def start(kind: type, resource: str) -> Any:
    made = ray.remote(num_cpus=0.1, resources={resource: 1}, enable_tensor_transport=True)(kind)
    return made.remote()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--address")
    ray.init(address=options.parse_args().address)
    register_direct_transport()
    method = ray.method(tensor_transport="rl_bridge_nixl")
    kind = type("Source", (Source,), {"weights": method(Source.weights)})
    source, taker = start(kind, "trainer"), start(Taker, "rollout")
    references = []
    for _ in range(REFERENCES):
        references.append(source.weights.remote())
        ray.wait(references[-1:], timeout=TIMEOUT_S)
        ray.get(source.step.remote(), timeout=TIMEOUT_S)
    sums = ray.get([taker.sum.remote(one) for one in references], timeout=TIMEOUT_S)
    # Each as it was when it was returned, whatever was written since.
    assert sums == [step * NBYTES // 8 for step in range(REFERENCES)], sums
    print(  # noqa: T201 - the test reads it
        f"{REFERENCES} references of {NBYTES} bytes, each as it was returned"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
