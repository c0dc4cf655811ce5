"""What a side-car reports about its engine and about an update: typed, plain JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rl_bridge.bridge.engine_state import Acknowledgement

Stage = Literal["imported", "prepared", "committed", "aborted", "refused", "undone", "torn"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class UpdateView(_View):
    """One update.

    Attributes:
        update_id: the update.
        weight_version: its version.
        root: its root.
        stage: how far it got, or what became of it.
        reason: why it got no further; empty else.
        acknowledgement: of a committed one.

    """

    update_id: str
    weight_version: int
    root: str
    stage: Stage
    reason: str = ""
    acknowledgement: Acknowledgement | None = None


class Recovery(_View):
    """What the start of a side-car found of the one before it.

    Attributes:
        outcome: ``nothing`` (there was none, or it had committed nothing), ``reinstalled`` (the
            engine is at `weight_version` again, proven), ``lost`` (its bytes are gone: the engine
            must get an update before it serves).
        weight_version: the version that the engine was to hold.
        interrupted: the update that was on its way when the side-car died, if there was one.
        interrupted_at: how far that one was: ``prepared``, or ``committing``.
        detail: in words.

    """

    outcome: Literal["nothing", "reinstalled", "lost"] = "nothing"
    weight_version: int | None = None
    interrupted: str | None = None
    interrupted_at: Literal["prepared", "committing"] | None = None
    detail: str = ""


class Status(_View):
    """Where the engine stands.

    Attributes:
        state: ``empty`` (no verified version yet), ``serving``, ``torn`` (must not serve), or
            ``lost`` (it is gone, or another one is in its place, which needs an update first). This
            is how the engine was at the last step.
        servable: whether the engine may answer requests.
        lost: how it is known that the engine is lost.
        active_weight_version: the version that it holds.
        active_update_id: that update.
        active_root: its root.
        pending: the update that waits for its next step.
        busy: what the side-car is doing right now; None if nothing.
        transport: the transport that the manifests must be of; empty for a bridge of your own.
        recovery: what the start found.
        last_acknowledgement: of the update that was committed last in this process.

    """

    state: Literal["empty", "serving", "torn", "lost"]
    servable: bool
    lost: str = ""
    active_weight_version: int | None = None
    active_update_id: str | None = None
    active_root: str | None = None
    pending: UpdateView | None = None
    busy: str | None = None
    transport: str = ""
    recovery: Recovery = Field(default_factory=Recovery)
    last_acknowledgement: Acknowledgement | None = None
