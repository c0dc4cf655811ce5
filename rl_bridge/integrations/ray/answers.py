"""What the actors answer, as it travels: JSON. What comes from another process is checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, StrictStr

from rl_bridge.bridge.pairing import Said
from rl_bridge.bridge.rollout import RolloutExecutor

__all__ = ["Announcement", "RolloutAnswer"]

Text = Annotated[StrictStr, Field(max_length=1 << 16)]
Version = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class Announcement(Said):
    """What a publisher has published last.

    Attributes:
        weight_version: its version; None before the first.
        root: its root: whoever acknowledges it holds exactly that.
        lanes: what it publishes on, in order.

    """

    weight_version: Version | None = None
    root: Text = ""
    lanes: Annotated[tuple[Text, ...], Field(max_length=1024)] = ()


class RolloutAnswer(Said):
    """What became of one call to a rollout, and what it holds now.

    Attributes:
        worker: the rollout's name.
        rank: its rank.
        pid: its process.
        node: the cluster's name of its machine.
        outcome: ``acknowledged``; ``refused``: the version before is active, byte for byte;
            ``torn``: the engine must not serve; ``unjoined``: it has no transport yet, as after a
            restart; ``status``: it was only asked.
        active_version: what the engine holds; None before the first version and while it is torn.
        active_root: the root of that; of a group's version, the whole one's.
        proof: what was found in the engine after the install.
        timings_ms: phase -> milliseconds.
        error: type of what was raised; empty if nothing was.
        message: its text.

    """

    worker: Text
    rank: Annotated[StrictInt, Field(ge=0)]
    pid: Annotated[StrictInt, Field(ge=0)]
    node: Text = ""
    outcome: Literal["acknowledged", "refused", "torn", "unjoined", "status"]
    active_version: Version | None = None
    active_root: Text = ""
    proof: dict[Text, Any] = Field(default_factory=dict)
    timings_ms: dict[Text, StrictFloat | StrictInt] = Field(default_factory=dict)
    error: Text = ""
    message: Text = ""

    def of(self, executor: RolloutExecutor, groups: Mapping[str, str]) -> Self:
        """The same, with what `executor` says that its engine holds.

        Args:
            executor: the rollout's.
            groups: update -> root of the whole group's version, where it holds a share of one.

        """
        version = executor.active_weight_version
        last = executor.last_ack
        if version is None or last is None or last.weight_version != version:
            return self.model_copy(update={"active_version": version})
        return self.model_copy(
            update={
                "active_version": version,
                "active_root": groups.get(last.update_id, last.root),
                "proof": last.proof.to_dict(),
                "timings_ms": dict(last.timings_ms),
            }
        )
