"""A trainer and a rollout, as actors of Ray; started by name, so that workers import them."""

import os
import signal
from pathlib import Path

import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.ray import EndpointFacts, RolloutActor, WeightPublisherActor
from rl_bridge.trainers.state_dict import Source


def weights(steps: int) -> dict[str, torch.Tensor]:
    """What the trainer holds after so many steps."""
    return {"a": torch.arange(1024.0) + steps, "b": torch.ones(3, 5) * steps}


class Trainer(WeightPublisherActor):
    """Its step adds one to every weight, in place."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.held = weights(0)
        # It serves a whole module of tests: Ray ends the actors of earlier ones when it likes, and
        # until then these read what they read.
        self.weight_options = {"shared-memory": {"max_slots": 24}}

    def weights_to_publish(self) -> Source:
        return self.held

    def step(self) -> None:
        for name, tensor in self.held.items():
            tensor.add_(1 if name == "a" else torch.ones_like(tensor))

    def pid(self) -> int:
        return os.getpid()

    def weights(self) -> dict[str, torch.Tensor]:
        """For Ray Direct Transport."""
        return self.held

    def weights_across(self) -> dict[str, torch.Tensor]:
        """The same, also for other nodes."""
        return self.held

    def direct_nbytes(self) -> int:
        """Bytes that the tensor transport of this process has sealed."""
        from ray.experimental.rdt.util import get_tensor_transport_manager

        bridge = get_tensor_transport_manager("RL_BRIDGE")._bridge
        return 0 if bridge is None else int(bridge.published_nbytes)

    def damage(self) -> None:
        """Change one byte of what is sealed, behind everybody's back."""
        from ray.experimental.rdt.util import get_tensor_transport_manager

        from rl_bridge.memory import vm

        end = get_tensor_transport_manager("RL_BRIDGE")._bridge.publisher.end
        (slot,) = [slot for slot in end._ring._slots if slot.update_id is not None]
        vm.store(slot.address + 64, b"\xee")


class Rollout(RolloutActor):
    """Its engine is a dict of tensors."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.engine = {name: torch.full_like(one, -1) for name, one in weights(0).items()}

    def weight_adapter(self) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(self.engine)

    def holds(self, steps: int) -> bool:
        self.check_weights()
        return all(torch.equal(self.engine[name], one) for name, one in weights(steps).items())

    def take(self, tensors: dict[str, torch.Tensor], steps: int) -> bool:
        """Whether what came by Ray Direct Transport is what was returned after so many steps."""
        return all(torch.equal(tensors[name], one) for name, one in weights(steps).items())

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Raising(Rollout):
    """Its own method raises where it should answer, but for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def update_weights(self, manifest: bytes) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise OSError("disk quota exceeded")
        return super().update_weights(manifest)


class Elsewhere(Rollout):
    """Says that it is on another machine; while `busy` exists, it has no engine."""

    def __init__(self, busy: str) -> None:
        super().__init__()
        self.busy = Path(busy)

    def find_weights(self, publisher_facts: bytes) -> bytes:
        facts = EndpointFacts.from_json(super().find_weights(publisher_facts))
        return facts.model_copy(update={"boot_id": "another", "opened": None}).to_json()

    def weight_adapter(self) -> ModuleInstallAdapter:
        if self.busy.exists():
            raise RuntimeError("CUDA out of memory")  # the engine's own
        return super().weight_adapter()
