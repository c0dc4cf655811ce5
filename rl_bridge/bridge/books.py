"""What a consumer can tell of the updates that it met; nothing changes here."""

from collections import OrderedDict

from rl_bridge.bridge.records import ImportedUpdate
from rl_bridge.errors import UnknownUpdate
from rl_bridge.lifecycle.table import Event, State

__all__ = ["Books"]


class Books:
    """A consumer's records, by update."""

    def __init__(self) -> None:
        """Begin with no update known."""
        self._updates: OrderedDict[str, ImportedUpdate] = OrderedDict()

    def state(self, update_id: str) -> State:
        """Fine state of an update.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return self._record(update_id, "tell the state of update").lifecycle.state

    def reason(self, update_id: str) -> str | None:
        """Why an update was rejected or torn.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return self._record(update_id, "tell the reason of update").lifecycle.reason

    def timings_ms(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds on this side.

        Raises:
            UnknownUpdate: nothing is known of it here.

        """
        return dict(self._record(update_id, "tell the timings of update").timings_ms)

    def has_acknowledged(self, update_id: str) -> bool:
        """Whether an update was acknowledged here; it may be released by now."""
        record = self._updates.get(update_id)
        return record is not None and record.lifecycle.has_taken(Event.ACKNOWLEDGE)

    def knows(self, update_id: str) -> bool:
        """Whether anything is known of the update here."""
        return update_id in self._updates

    def _record(self, update_id: str, purpose: str) -> ImportedUpdate:
        record = self._updates.get(update_id)
        if record is None:
            msg = (
                f"cannot {purpose}: unknown weight update {update_id}. Call "
                "import_update(manifest) first."
            )
            raise UnknownUpdate(msg)
        return record
