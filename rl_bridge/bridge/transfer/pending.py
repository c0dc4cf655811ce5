"""An update whose batches are coming in: which came, in what order, and whether they fit. Pure."""

from rl_bridge.bridge.transfer.batching import Layout
from rl_bridge.bridge.transfer.requests import WeightUpdateRequest
from rl_bridge.errors import MalformedManifest, WeightUpdateRejectedError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["PendingUpdate"]

_SHOWN = 5


class PendingUpdate:
    """One update from its first request to its last.

    Attributes:
        manifest: the update, as this engine imports it.
        update_id: by which its requests go: where each GPU has a copy, that of the first one.
        batches: names of each batch that came.
        last: the request that came last.

    """

    def __init__(self, manifest: WeightUpdateManifest, *, update_id: str | None = None) -> None:
        """Begin; no batch is there yet."""
        self.manifest = manifest
        self.update_id = update_id or manifest.update_id
        self.batches: list[tuple[str, ...]] = []
        self.last: WeightUpdateRequest | None = None
        self._seen: set[str] = set()
        self._num_batches: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last batch came."""
        return self.last is not None and self.last.is_last

    def add(self, request: WeightUpdateRequest) -> None:
        """Take the next batch.

        Raises:
            WeightUpdateRejectedError: another batch is due.
            MalformedManifest: the batch is not of this update, or not as its manifest says.

        """
        manifest, name = self.manifest, _name(request)
        if (request.update_id, request.weight_version) != (
            self.update_id,
            manifest.weight_version,
        ):
            msg = (
                f"{name} came with the manifest of version {manifest.weight_version} (update "
                f"{self.update_id}). Send requests as the sender made them."
            )
            raise MalformedManifest(msg)
        due = (len(self.batches), self._num_batches or request.num_batches)
        if (request.batch, request.num_batches) != due:
            msg = (
                f"{name} came as batch {request.batch} of {request.num_batches}, expected batch "
                f"{due[0]} of {due[1]}. Send the requests of an update in order, each once."
            )
            raise WeightUpdateRejectedError(msg)
        self._check_names(request, name)
        self.batches.append(request.names)
        self._seen.update(request.names)
        self._num_batches = request.num_batches
        self.last = request

    def _check_names(self, request: WeightUpdateRequest, name: str) -> None:
        rows = self.manifest.table.rows
        strange = [one for one in request.names if one not in rows or one in self._seen]
        if strange:
            msg = (
                f"{name} names {strange[:_SHOWN]}, which the manifest does not have or an earlier "
                "batch had. Send requests as the sender made them."
            )
            raise MalformedManifest(msg)
        said = Layout.of(self.manifest, request.names)
        if (said.dtypes, said.shapes) != (request.dtypes, request.shapes):
            msg = (
                f"{name}: its dtypes or shapes are not those of the manifest. Send requests as "
                "the sender made them."
            )
            raise MalformedManifest(msg)
        missing = rows.keys() - self._seen - set(request.names) if request.is_last else ()
        if missing:
            msg = (
                f"{name} is the last one, and {len(missing)} tensors came in none, such as "
                f"{sorted(missing)[:_SHOWN]}. Send all requests of an update."
            )
            raise MalformedManifest(msg)


def _name(request: WeightUpdateRequest) -> str:
    return f"batch {request.batch} of version {request.weight_version} (update {request.update_id})"
