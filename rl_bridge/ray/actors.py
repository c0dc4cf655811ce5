"""Mixins for a user's own actors: what a `RolloutFleet` calls.

Derive from one, make it an actor with ``ray.remote``, and write the one hook. Placement, resources
and restarts are Ray's. Only bytes, text and numbers go through these methods.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.groups.wanted import Wanted, WantedLayout
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray.calls import here
from rl_bridge.ray.group_store import GroupSeat, RayExchange
from rl_bridge.ray.publisher_side import GroupLane, MakeLane, PublisherSide
from rl_bridge.ray.rollout_side import RolloutSide
from rl_bridge.trainers.state_dict import Source

__all__ = [
    "RolloutActor",
    "WeightPublisherActor",
]

# An actor may run several methods at a time, and has one side. (Of the process, as mixins have no
# __init__ that is sure to be called.)
_MAKING = threading.Lock()


class WeightPublisherActor:
    """The trainer's actor, or that of one of its ranks. Write `weights_to_publish`.

    Where each of several ranks holds a part of the weights, write `weight_placements`, too, and
    give the fleet a list of the ranks' actors.

    Attributes:
        weight_directories: directories for named segments, where rollouts are in other containers.
        weight_state_dir: where the last version is kept, so that a restarted trainer goes on.
        weight_options: transport -> more options for `make_weight_bridge`.

    """

    weight_directories: Sequence[str] = ()
    weight_state_dir: str | None = None
    weight_options: Mapping[str, Mapping[str, object]] = {}

    __publisher_side: PublisherSide | None = None
    __seat: GroupSeat | None = None

    def weights_to_publish(self) -> Source:
        """What to publish: a module, a state dict, or chunks. Called once for each transport.

        Raises:
            TypeError: the actor's class does not say it.

        """
        raise TypeError(
            f"{type(self).__name__} does not say what to publish. Write weights_to_publish(self)."
        )

    def weight_placements(self) -> Mapping[str, Placement]:
        """Where this rank's tensors lie in the whole ones: what an extractor's `placements` gives.

        Raises:
            TypeError: the actor's class does not say it.

        """
        raise TypeError(
            f"{type(self).__name__} is a rank of a group and does not say which part of the "
            "weights it holds. Write weight_placements(self)."
        )

    def join_weight_group(self, seat: bytes, store: Any) -> bytes:
        """Publish as a rank from here on; what it has published as that rank stays.

        Args:
            seat: its `GroupSeat`.
            store: the handle of the actor that runs `GroupStore`.

        Returns:
            Its `Announcement`.

        """
        taken, before = GroupSeat.from_json(seat), self.__seat

        def make_lane(name: str, bridge: TensorBridge) -> GroupLane:
            exchange = RayExchange(store, taken, name=name)
            return GroupLane(bridge, exchange, self.weight_placements, timeout_s=taken.timeout_s)

        is_same = before is not None and (before.rank, before.world_size) == (
            taken.rank,
            taken.world_size,
        )
        if self.__publisher_side is not None and is_same and not taken.anew:
            self.__publisher_side.reseat(make_lane)
        else:
            self.close_weights()  # its ports are the next one's
            self.__publisher_side = self._make_side(taken.rank, make_lane)
        self.__seat = taken
        return self.__publisher_side.announcement()

    def as_weight_rank(self, method: str, *given: Any) -> tuple[str, Any]:
        """Call another method, as a rank of a group that has its seat.

        Returns:
            In which group, empty if in none, and the answer. One that Ray started anew has none,
            and does nothing of what a publisher by itself would do.

        """
        if self.__seat is None:
            return "", None
        return self.__seat.group, getattr(self, method)(*given)

    def publish_weights(
        self, weight_version: int, metadata: Mapping[str, JSONValue] | None = None
    ) -> tuple[bytes, dict[str, bytes]]:
        """Publish the weights of now. See `PublisherSide.publish`."""
        return self._publisher_side().publish(weight_version, metadata)

    def weight_facts(self) -> bytes:
        """See `PublisherSide.facts`."""
        return self._publisher_side().facts()

    def serve_weights(self, choice: bytes) -> bytes:
        """See `PublisherSide.serve`."""
        return self._publisher_side().serve(choice)

    def drop_weights(self, lane: str) -> None:
        """See `PublisherSide.drop`."""
        self._publisher_side().drop(lane)

    def weight_announcement(self) -> bytes:
        """See `PublisherSide.announcement`."""
        return self._publisher_side().announcement()

    def weight_reports(self) -> bytes:
        """See `PublisherSide.reports`."""
        return self._publisher_side().reports()

    def close_weights(self) -> None:
        """Take back everything that was published."""
        self.__seat = None
        if self.__publisher_side is not None:
            self.__publisher_side.close()

    def _publisher_side(self) -> PublisherSide:
        with _MAKING:
            if self.__publisher_side is None:
                self.__publisher_side = self._make_side(0, None)
            return self.__publisher_side

    def _make_side(self, rank: int, make_lane: MakeLane | None) -> PublisherSide:
        node, address = here()
        return PublisherSide(
            self.weights_to_publish,
            worker=type(self).__name__,
            rank=rank,
            node=node,
            address=address,
            directories=self.weight_directories,
            state_dir=self.weight_state_dir,
            options=self.weight_options,
            make_lane=make_lane,
        )


class RolloutActor:
    """A rollout's actor. Write `weight_adapter`, and ask `check_weights` before you serve.

    Attributes:
        weight_directories: directories that it may share with the trainer.
        weight_options: transport -> more options for `make_weight_bridge`.

    """

    weight_directories: Sequence[str] = ()
    weight_options: Mapping[str, Mapping[str, object]] = {}

    __rollout_side: RolloutSide | None = None

    def weight_adapter(self) -> WeightInstallAdapter | TransactionalAdapter | None:
        """How weights get into the engine, such as ``ModuleInstallAdapter(self.engine)``.

        None where the imported tensors themselves are what the rollout uses: `imported_weights`.

        Raises:
            TypeError: the actor's class does not say it.

        """
        raise TypeError(
            f"{type(self).__name__} does not say how weights get into its engine. Write "
            "weight_adapter(self)."
        )

    def weight_layout(self) -> Wanted | WantedLayout | None:
        """What this rollout holds of a group's weights; None: every tensor, whole."""
        return None

    def find_weights(self, publisher_facts: bytes) -> bytes:
        """See `RolloutSide.facts`."""
        return self._rollout_side().facts(publisher_facts)

    def join_weights(self, choice: bytes) -> bytes:
        """See `RolloutSide.join`."""
        return self._rollout_side().join(choice)

    def update_weights(self, manifest: bytes) -> bytes:
        """See `RolloutSide.update`."""
        return self._rollout_side().update(manifest)

    def weight_status(self) -> bytes:
        """See `RolloutSide.status`."""
        return self._rollout_side().status()

    def close_weights(self) -> None:
        """See `RolloutSide.close`."""
        self._rollout_side().close()

    def check_weights(self) -> int:
        """The version that this actor may answer with; for the actor's own methods.

        Raises:
            TornEngine: it may not answer.
            WeightBridgeUnavailableError: it has no verified version yet.

        """
        return self._rollout_side().check_servable()

    def imported_weights(self) -> Mapping[str, torch.Tensor]:
        """The verified tensors of the active version; for an actor that has no adapter.

        They are the transport's own memory: do not write to them, and take them anew behind each
        update, as they end with their version.

        Raises:
            TornEngine: it may not answer.
            WeightBridgeUnavailableError: it has no verified version yet.

        """
        side = self._rollout_side()
        side.check_servable()
        return side.executor.shared_weights

    def _rollout_side(self) -> RolloutSide:
        with _MAKING:
            if self.__rollout_side is None:
                node, _ = here()
                self.__rollout_side = RolloutSide(
                    self.weight_adapter,
                    worker=type(self).__name__,
                    node=node,
                    directories=self.weight_directories,
                    options=self.weight_options,
                    wanted=self.weight_layout,
                )
            return self.__rollout_side
