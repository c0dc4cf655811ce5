"""What a side-car did to its engine, written down before and after each step: a crash is told.

The last committed update, and the one that was on its way. A side-car that was killed reads here
what to bring its engine back to.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import WeightBridgeError
from rl_bridge.integrations.remote.durable import DurableLines, write_durably
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["Entry", "Ledger", "Step"]

Step = Literal["prepared", "committing", "committed", "ended"]
_FILE = "updates.log"
_SUFFIX = ".manifest.json"
_MANY = 256
_Id = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class Entry(BaseModel):
    """One line: which update took which step.

    Attributes:
        format: of the line.
        step: what is, or is about to be, done.
        update_id: the update.
        publisher_id: whose it is.
        weight_version: its version.
        root: its root.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl_bridge.sidecar/1"] = "rl_bridge.sidecar/1"
    step: Step
    update_id: _Id
    publisher_id: _Id
    weight_version: Annotated[StrictInt, Field(ge=0)]
    root: _Id

    @classmethod
    def of(cls, manifest: WeightUpdateManifest, step: Step) -> "Entry":
        """The line for a step of an update."""
        return cls(
            step=step,
            update_id=manifest.update_id,
            publisher_id=manifest.publisher_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
        )


class Ledger:
    """The steps of one engine's updates. Not thread-safe: one step is taken at a time.

    Attributes:
        active: the update that was committed last; None before the first.
        pending: the one that was prepared, or being committed, and of which no end is written.

    """

    def __init__(self, directory: Path) -> None:
        """Read what was done so far.

        Raises:
            WeightBridgeError: the file cannot be used, or is damaged; it is never guessed at.

        """
        self._directory = directory
        self.active: Entry | None = None
        self.pending: Entry | None = None
        self._lines = DurableLines(directory / _FILE)
        try:
            for line in self._lines.found:
                self._take(Entry.model_validate_json(line))
        except ValidationError as error:
            self._lines.close()
            msg = (
                f"the side-car's ledger {directory / _FILE} is damaged ({error!r}). Move the "
                "directory away and start with a fresh engine."
            )
            raise WeightBridgeError(msg) from error
        self._num_lines = len(self._lines.found)

    def keep(self, manifest: WeightUpdateManifest) -> None:
        """Keep the manifest of an update that may be committed.

        Raises:
            WeightBridgeError: it could not be written.

        """
        write_durably(self._path(manifest.update_id), manifest.to_json().encode("ascii"))

    def manifest_of(self, entry: Entry) -> WeightUpdateManifest:
        """The manifest that was kept.

        Raises:
            WeightBridgeError: it is gone or damaged.

        """
        try:
            text = self._path(entry.update_id).read_bytes()
        except OSError as error:
            msg = f"the manifest of version {entry.weight_version} is gone: {error}. Publish again."
            raise WeightBridgeError(msg) from error
        return WeightUpdateManifest.from_json(text)

    def note(self, manifest: WeightUpdateManifest, step: Step) -> None:
        """Write down a step; on return that is durable.

        Raises:
            WeightBridgeError: it could not be written.

        """
        self._note(Entry.of(manifest, step))

    def end(self, entry: Entry) -> None:
        """Write down that an update which a crash cut off is over.

        Raises:
            WeightBridgeError: it could not be written.

        """
        if self.pending is not None:
            self._note(entry.model_copy(update={"step": "ended"}))

    def _note(self, entry: Entry) -> None:
        self._lines.append(entry.model_dump_json())
        self._take(entry)
        self._num_lines += 1
        if self._num_lines > _MANY:
            self.tidy()

    def tidy(self) -> None:
        """Keep what counts, and the manifests that it names.

        Raises:
            WeightBridgeError: it could not be written; what was there stands.

        """
        kept = [entry for entry in (self.active, self.pending) if entry is not None]
        self._lines.rewrite(entry.model_dump_json() for entry in kept)
        self._num_lines = len(kept)
        self._drop_all_but({entry.update_id for entry in kept})

    def forget(self, update_id: str) -> None:
        """Drop the manifest of an update that is neither active nor pending."""
        if update_id not in {entry.update_id for entry in (self.active, self.pending) if entry}:
            with suppress(OSError):  # the next start tries again
                self._path(update_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lines.close()

    def _take(self, entry: Entry) -> None:
        if entry.step == "committed":
            self.active, self.pending = entry, None
        elif entry.step == "ended":
            self.pending = None
        else:
            self.pending = entry

    def _path(self, update_id: str) -> Path:
        return self._directory / f"{update_id}{_SUFFIX}"

    def _drop_all_but(self, kept: set[str]) -> None:
        for name in os.listdir(self._directory):  # noqa: PTH208 - names are all that is asked for
            if name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) not in kept:
                with suppress(OSError):  # the next start tries again
                    (self._directory / name).unlink(missing_ok=True)
