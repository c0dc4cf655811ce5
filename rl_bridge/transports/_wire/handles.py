"""Reading what a manifest says of where its bytes are: checked before anything is connected to."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["read_handle", "require_publisher"]

_Handle = TypeVar("_Handle", bound=BaseModel)


def read_handle(kind: type[_Handle], manifest: WeightUpdateManifest) -> _Handle:
    """The manifest's handle.

    Raises:
        MalformedManifest: it is none of this kind.

    """
    try:
        return kind.model_validate(thaw(manifest.handle))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        msg = (
            f"update {manifest.update_id}: handle field {where}: {first['msg']}. Send the "
            "manifest as it was published."
        )
        raise MalformedManifest(msg) from error


def require_publisher(manifest: WeightUpdateManifest, publisher_id: str) -> None:
    """Compare whom the handle leads to with whose manifest it is.

    Raises:
        MalformedManifest: it leads to somebody else.

    """
    if publisher_id != manifest.publisher_id:
        msg = (
            f"update {manifest.update_id}: its handle is of publisher {publisher_id}, the "
            f"manifest of {manifest.publisher_id}. Send the manifest as it was published."
        )
        raise MalformedManifest(msg)
