"""Mixins for a user's own actors: what a `RolloutFleet` calls.

Derive from one, make it an actor with ``ray.remote``, and write the one hook. Placement, resources
and restarts are Ray's. Only bytes, text and numbers go through these methods.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_bridge.assembly.wanted import Wanted, WantedLayout
from rl_bridge.errors import SessionRefused
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.parallel import Placement
from rl_bridge.ray.calls import here, require
from rl_bridge.ray.group_store import FleetMembership, RayExchange
from rl_bridge.ray.publisher_endpoint import EndpointOptions, GroupRank, PublisherEndpoint
from rl_bridge.ray.rollout_endpoint import RolloutEndpoint
from rl_bridge.trainers.state_dict import Source

# An actor may run several methods at a time, and has one endpoint. The lock belongs to the process,
# since a mixin's __init__ need not be called.
_MAKING = threading.Lock()


def _require_fleet(membership: FleetMembership, fleet: str) -> None:
    if membership.fleet not in {"", fleet}:
        raise SessionRefused(
            f"the fleet of driver {membership.driver} has this trainer, and one fleet at a time "
            "publishes its weights. Close that fleet; or take the trainer over, by "
            "RolloutFleet(trainer, take_over=True), which shuts the other one out."
        )


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

    __publisher_endpoint: PublisherEndpoint | None = None
    __membership: FleetMembership | None = None

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

    def join_weight_fleet(self, membership: bytes, store: Any) -> bytes:
        """Publish for a fleet from here on; versions that it published in this place stay.

        Args:
            membership: its `FleetMembership`.
            store: for a rank of a group, the handle of the actor that runs `GroupStore`.

        Returns:
            Its `Announcement`.

        Raises:
            SessionRefused: another fleet has it.

        """
        taken, before = FleetMembership.from_json(membership), self.__membership
        if before is not None and not taken.take_over:
            _require_fleet(before, taken.fleet)
        group = None
        if taken.world_size:
            group = GroupRank(
                exchange=lambda channel: RayExchange(store, taken, name=channel),
                placements=self.weight_placements,
                timeout_s=taken.timeout_s,
            )
        place = (before.rank, before.world_size) if before is not None else (0, 0)
        endpoint = self.__publisher_endpoint
        if endpoint is not None and place == (taken.rank, taken.world_size) and not taken.anew:
            endpoint.rejoin(group)
        else:
            self.close_weights()  # first, since the next endpoint may need its ports
            endpoint = self.__publisher_endpoint = self._make_endpoint(taken.rank, group)
        self.__membership = taken
        return endpoint.announcement()

    def leave_weight_fleet(self, fleet: str) -> None:
        """Be free for the next fleet; what was published stays."""
        if self.__membership is not None and self.__membership.fleet == fleet:
            self.__membership = self.__membership.model_copy(update={"fleet": ""})

    def for_weight_fleet(self, fleet: str, method: str, *given: Any) -> tuple[bool, Any]:
        """Call another method for a fleet.

        Returns:
            Whether it was called, and the answer. An actor that Ray started anew has no fleet, and
            does nothing.

        Raises:
            SessionRefused: another fleet has it.

        """
        if self.__membership is None or not self.__membership.fleet:
            return False, None
        _require_fleet(self.__membership, fleet)
        return True, getattr(self, method)(*given)

    def publish_weights(
        self,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> tuple[bytes, dict[str, bytes]]:
        """Publish the weights of now. See `PublisherEndpoint.publish`."""
        return self._publisher_endpoint().publish(weight_version, metadata)

    def weight_facts(self) -> bytes:
        """See `PublisherEndpoint.facts`."""
        return self._publisher_endpoint().facts()

    def serve_weights(self, choice: bytes) -> bytes:
        """See `PublisherEndpoint.serve`."""
        return self._publisher_endpoint().serve(choice)

    def drop_weights(self, channel: str) -> None:
        """See `PublisherEndpoint.drop`."""
        self._publisher_endpoint().drop(channel)

    def weight_announcement(self) -> bytes:
        """See `PublisherEndpoint.announcement`."""
        return self._publisher_endpoint().announcement()

    def weight_reports(self) -> bytes:
        """See `PublisherEndpoint.reports`."""
        return self._publisher_endpoint().reports()

    def close_weights(self) -> None:
        """Take back everything that was published."""
        self.__membership = None
        if self.__publisher_endpoint is not None:
            self.__publisher_endpoint.close()

    def _publisher_endpoint(self) -> PublisherEndpoint:
        with _MAKING:
            if self.__publisher_endpoint is None:
                self.__publisher_endpoint = self._make_endpoint(0, None)
            return self.__publisher_endpoint

    def _make_endpoint(self, rank: int, group: GroupRank | None) -> PublisherEndpoint:
        node, address = here()
        options = EndpointOptions(
            worker=type(self).__name__,
            rank=rank,
            node=node,
            address=address,
            directories=self.weight_directories,
            state_dir=self.weight_state_dir,
            transports=self.weight_options,
        )
        return PublisherEndpoint(self.weights_to_publish, options, group=group)


class RolloutActor:
    """A rollout's actor. Write `weight_adapter`, and ask `check_weights` before you serve.

    Attributes:
        weight_directories: directories that it may share with the trainer.
        weight_options: transport -> more options for `make_weight_bridge`.

    """

    weight_directories: Sequence[str] = ()
    weight_options: Mapping[str, Mapping[str, object]] = {}

    __rollout_endpoint: RolloutEndpoint | None = None

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
        """See `RolloutEndpoint.facts`."""
        return self._rollout_endpoint().facts(publisher_facts)

    def join_weights(self, choice: bytes) -> bytes:
        """See `RolloutEndpoint.join`."""
        return self._rollout_endpoint().join(choice)

    def update_weights(self, manifest: bytes) -> bytes:
        """See `RolloutEndpoint.update`."""
        return self._rollout_endpoint().update(manifest)

    def weight_status(self) -> bytes:
        """See `RolloutEndpoint.status`."""
        return self._rollout_endpoint().status()

    def close_weights(self) -> None:
        """See `RolloutEndpoint.close`."""
        self._rollout_endpoint().close()

    def check_weights(self) -> int:
        """The version that this actor may answer with; for the actor's own methods.

        Raises:
            TornEngine: it may not answer.
            EngineLost: its engine was gone when it was asked last.
            WeightBridgeUnavailableError: it has no verified version yet.

        """
        return self._rollout_endpoint().check_servable()

    def imported_weights(self) -> Mapping[str, torch.Tensor]:
        """The verified tensors of the active version; for an actor that has no adapter.

        They are the transport's own memory: do not write to them, and take them anew after each
        update, as they end with their version.

        Raises:
            TornEngine: it may not answer.
            EngineLost: its engine was gone when it was asked last.
            WeightBridgeUnavailableError: it has no verified version yet.

        """
        endpoint = self._rollout_endpoint()
        endpoint.check_servable()
        return endpoint.executor.shared_weights

    def _rollout_endpoint(self) -> RolloutEndpoint:
        with _MAKING:
            if self.__rollout_endpoint is None:
                node, _ = here()
                self.__rollout_endpoint = RolloutEndpoint(
                    self.weight_adapter,
                    worker=type(self).__name__,
                    node=node,
                    directories=self.weight_directories,
                    options=self.weight_options,
                    wanted=self.weight_layout,
                )
            return self.__rollout_endpoint


def register_direct_transport() -> None:
    """Make the tensor transports ``rl_bridge`` and ``rl_bridge_nixl`` known to Ray. Idempotent.

    Call it in the process that creates the actors, before it creates them: Ray tells each actor.
    What such a method returns is sealed when it returns, and verified to the byte where it arrives.
    ``rl_bridge`` is carried by shared memory, for actors of one machine: elsewhere the receiver
    says why not. ``rl_bridge_nixl`` is carried by nixl, also between nodes.

    Raises:
        WeightBridgeUnavailableError: Ray is not installed, or has no Direct Transport.

    """
    known = require("ray.experimental.rdt.util").transport_manager_info
    experimental = require("ray.experimental")
    direct = require("rl_bridge.ray.direct")  # by its name: each actor imports the classes so
    for manager in (direct.DirectTransport, direct.DirectTransportAcross):
        if manager.name.upper() not in known:
            experimental.register_tensor_transport(manager.name, ["cpu"], manager, torch.Tensor)
