"""An installer of one's own, with undo and proof, for an engine that is no torch module."""

from collections.abc import Mapping

import torch

from rl_bridge import RolloutExecutor, SimpleAdapter, make_weight_bridge


class Engine:
    """Stores each matrix transposed, where only its own `load` and `read` reach it."""

    def __init__(self, stored: Mapping[str, torch.Tensor]) -> None:
        self._stored = dict(stored)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the trainer's form."""
        return self._stored[name].t()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor in the trainer's form."""
        self._stored[name].copy_(tensor.t())


class HalfWay(Engine):
    """Fails in the middle of an install when it is told to."""

    loads_left = 1_000

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.loads_left -= 1
        if self.loads_left == 0:
            raise OSError("the device fell off the bus")
        super().load(name, tensor)


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    names = list(model.state_dict())
    engine = HalfWay({name: torch.zeros_like(one.t()) for name, one in model.state_dict().items()})
    adapter = SimpleAdapter(engine.read, engine.load, names=names)
    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as trainer,
        make_weight_bridge("shared-memory", source_worker="rollout") as rollout,
        RolloutExecutor(rollout, adapter) as executor,
    ):
        installed = executor.update_weights(trainer.publish(model))
        assert installed.proof.method == "digest"

        before = {name: engine.read(name).clone() for name in names}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        engine.loads_left = 3
        try:
            executor.update_weights(trainer.publish(model))
        except OSError as error:
            print(f"{error}: {error.__notes__[0]}")
        assert executor.active_weight_version == 0
        assert all(torch.equal(engine.read(name), tensor) for name, tensor in before.items())


if __name__ == "__main__":
    main()
