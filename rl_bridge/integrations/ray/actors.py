"""Mixins for a user's own actors: what a `RolloutFleet` calls.

Derive from one, make it an actor with ``ray.remote``, and write the one hook. Placement, resources
and restarts are Ray's. Only bytes, text and numbers go through these methods.
"""

from collections.abc import Mapping, Sequence

from rl_bridge.extractors.state_dict import Source
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.integrations.ray.library import here
from rl_bridge.integrations.ray.publisher_side import PublisherSide
from rl_bridge.integrations.ray.rollout_side import RolloutSide
from rl_bridge.manifest.canonical import JSONValue

__all__ = ["RolloutActor", "WeightPublisherActor"]


class WeightPublisherActor:
    """The trainer's actor. Write `weights_to_publish`.

    Attributes:
        weight_directories: directories for named segments, where rollouts are in other containers.
        weight_state_dir: where the last version is kept, so that a restarted trainer goes on.
        weight_options: transport -> more options for `make_weight_bridge`.

    """

    weight_directories: Sequence[str] = ()
    weight_state_dir: str | None = None
    weight_options: Mapping[str, Mapping[str, object]] = {}

    __publisher_side: PublisherSide | None = None

    def weights_to_publish(self) -> Source:
        """What to publish: a module, a state dict, or chunks. Called once for each transport.

        Raises:
            TypeError: the actor's class does not say it.

        """
        raise TypeError(
            f"{type(self).__name__} does not say what to publish. Write weights_to_publish(self)."
        )

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

    def weight_announcement(self) -> bytes:
        """See `PublisherSide.announcement`."""
        return self._publisher_side().announcement()

    def weight_reports(self) -> bytes:
        """See `PublisherSide.reports`."""
        return self._publisher_side().reports()

    def close_weights(self) -> None:
        """Take back everything that was published."""
        if self.__publisher_side is not None:
            self.__publisher_side.close()

    def _publisher_side(self) -> PublisherSide:
        if self.__publisher_side is None:
            node, address = here()
            self.__publisher_side = PublisherSide(
                self.weights_to_publish,
                worker=type(self).__name__,
                node=node,
                address=address,
                directories=self.weight_directories,
                state_dir=self.weight_state_dir,
                options=self.weight_options,
            )
        return self.__publisher_side


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
        executor = self._rollout_side().executor
        executor.check_servable()
        version = executor.active_weight_version
        assert version is not None  # what is servable has one
        return version

    def _rollout_side(self) -> RolloutSide:
        if self.__rollout_side is None:
            node, _ = here()
            self.__rollout_side = RolloutSide(
                self.weight_adapter,
                worker=type(self).__name__,
                node=node,
                directories=self.weight_directories,
                options=self.weight_options,
            )
        return self.__rollout_side
