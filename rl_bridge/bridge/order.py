"""Which updates a consumer lets in: only what is newer, and never what was rejected.

Kept apart from the records of single updates, which are forgotten after a while: what was decided
here holds for as long as the consumer lives.
"""

from rl_bridge.errors import StaleUpdate, WeightUpdateRejectedError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["UNSEEN", "Order"]

# Ids that were rejected before any manifest of theirs came: nobody knows whose they are, so no
# later version can make them superfluous. The oldest go when there are more.
UNSEEN = 4096
_ANY = b""


class Order:
    """The last acknowledged update of each publisher, and what was rejected above it."""

    def __init__(self) -> None:
        """Begin with no publisher known."""
        self._floors: dict[str, tuple[int, str]] = {}
        # By id and header: of an update of which nothing could be seen but a manifest that may have
        # been changed on its way, that manifest alone. The empty header is any.
        self._rejected: dict[tuple[str, bytes], tuple[str, int]] = {}
        self._unseen: dict[str, None] = {}

    def check(self, manifest: WeightUpdateManifest, *, reason: str | None) -> None:
        """Refuse what must not be imported.

        Args:
            manifest: of the update.
            reason: why it was rejected, where that is still known.

        Raises:
            WeightUpdateRejectedError: it was rejected here.
            StaleUpdate: it is not above the last acknowledged version of its publisher.

        """
        name = f"update {manifest.update_id} (version {manifest.weight_version})"
        if self._has_rejected(manifest):
            because = f": {reason}" if reason else ""
            msg = f"weight {name} was rejected{because}. Publish again under a new version."
            raise WeightUpdateRejectedError(msg)
        floor = self._floors.get(manifest.publisher_id)
        if floor is None or manifest.weight_version > floor[0]:
            return
        # The floor itself may come again once it was released: after a loss, into a fresh engine.
        if (manifest.weight_version, manifest.update_id) == floor:
            return
        msg = (
            f"{name} is stale: version {floor[0]} of publisher {manifest.publisher_id} was "
            "acknowledged here already. A late or replayed manifest is never installed: get the "
            "publisher's latest one."
        )
        raise StaleUpdate(msg)

    def _has_rejected(self, manifest: WeightUpdateManifest) -> bool:
        update_id = manifest.update_id
        return (
            update_id in self._unseen
            or (update_id, _ANY) in self._rejected
            # (Digested only where it decides: that takes a while.)
            or (bool(self._rejected) and (update_id, manifest.header_digest) in self._rejected)
        )

    def check_newest(self, manifest: WeightUpdateManifest) -> None:
        """Refuse to acknowledge what something later has overtaken since its import.

        Raises:
            StaleUpdate: a later version of its publisher was acknowledged.

        """
        floor = self._floors.get(manifest.publisher_id)
        this = (manifest.weight_version, manifest.update_id)
        if floor is None or manifest.weight_version > floor[0] or this == floor:
            return
        msg = (
            f"cannot acknowledge version {manifest.weight_version}: version {floor[0]} of "
            f"publisher {manifest.publisher_id} was acknowledged already, and versions only "
            "grow. Reject or release it."
        )
        raise StaleUpdate(msg)

    def acknowledged(self, manifest: WeightUpdateManifest) -> None:
        """Let in only what is above this update, or itself again, from now on."""
        version = manifest.weight_version
        self._floors[manifest.publisher_id] = (version, manifest.update_id)
        # What the floor has passed is stale: it need not be known by its id any more.
        self._rejected = {
            key: (publisher_id, rejected)
            for key, (publisher_id, rejected) in self._rejected.items()
            if publisher_id != manifest.publisher_id or rejected > version
        }

    def rejected_copy(self, manifest: WeightUpdateManifest) -> None:
        """Never let this very manifest in again; its update may come with another header."""
        key = (manifest.update_id, manifest.header_digest)
        self._rejected[key] = (manifest.publisher_id, manifest.weight_version)

    def rejected(self, update_id: str, manifest: WeightUpdateManifest | None) -> None:
        """Never let this update in again; `manifest` is None for an id that came without one."""
        if manifest is not None:
            self._rejected[update_id, _ANY] = (manifest.publisher_id, manifest.weight_version)
            return
        self._unseen.pop(update_id, None)
        self._unseen[update_id] = None
        while len(self._unseen) > UNSEEN:
            del self._unseen[next(iter(self._unseen))]
