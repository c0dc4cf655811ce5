"""What a side-car did to its engine, written down before and after each step: a crash is told.

The last committed update, and the one that was on its way. A side-car that was killed reads here
what to bring its engine back to.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from rl_bridge.errors import WeightBridgeError
from rl_bridge.integrations.remote.durable import DurableLines
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["Entry", "Ledger", "Step"]

Step = Literal["prepared", "committing", "committed", "ended"]
_FILE = "updates.log"
_BREAK = "\t"
_SURPLUS_NBYTES = 256 * 1024
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
        self.active: Entry | None = None
        self.pending: Entry | None = None
        self._texts: dict[str, str] = {}
        self._lines = DurableLines(directory / _FILE)
        try:
            for line in self._lines.found:
                head, _, text = line.partition(_BREAK)
                self._take(Entry.model_validate_json(head), text or None)
        except ValidationError as error:
            self._lines.close()
            msg = (
                f"the side-car's ledger {directory / _FILE} is damaged ({error!r}). Move the "
                "directory away and start with a fresh engine."
            )
            raise WeightBridgeError(msg) from error
        self._least_nbytes = self._lines.nbytes

    def manifest_of(self, entry: Entry) -> WeightUpdateManifest:
        """The manifest that came with a commit.

        Raises:
            WeightBridgeError: there is none, or it is damaged.

        """
        return WeightUpdateManifest.from_json(self._texts.get(entry.update_id, ""))

    def note(self, manifest: WeightUpdateManifest, step: Step) -> None:
        """Write down a step.

        A commit's beginning, with the manifest, and its failure are durable on return. The others
        survive the process and not the machine: a start does the same without them, since what it
        takes for being committed it commits again.

        Raises:
            WeightBridgeError: it could not be written.

        """
        self._note(Entry.of(manifest, step), manifest)

    def settle(self, entry: Entry, step: Step) -> None:
        """Write down what became of an update that a crash cut off.

        Raises:
            WeightBridgeError: it could not be written.

        """
        if self.pending is not None:
            self._note(entry.model_copy(update={"step": step}), None)

    def tidy(self) -> None:
        """Keep what counts, and drop the rest.

        Raises:
            WeightBridgeError: it could not be written; what was there stands.

        """
        kept = [entry for entry in (self.active, self.pending) if entry is not None]
        # What begins a commit carries the manifest.
        texts = {entry.update_id: self._texts.get(entry.update_id) for entry in kept}
        self._texts = {name: text for name, text in texts.items() if text is not None}
        lines = []
        for entry in kept:
            text = self._texts.get(entry.update_id)
            if text is not None and entry.step == "committed":
                lines.append(_line(entry.model_copy(update={"step": "committing"}), text))
                text = None
            lines.append(_line(entry, text))
        self._lines.rewrite(lines)
        self._least_nbytes = self._lines.nbytes

    def _note(self, entry: Entry, manifest: WeightUpdateManifest | None) -> None:
        begins = entry.step == "committing" and manifest is not None
        text = manifest.to_json() if begins and manifest is not None else None
        was_begun = self.pending is not None and self.pending.step == "committing"
        fails = entry.step == "ended" and was_begun
        self._lines.append(_line(entry, text), sync=begins or fails)
        self._take(entry, text)
        if self._lines.nbytes > 4 * self._least_nbytes + _SURPLUS_NBYTES:
            self.tidy()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lines.close()

    def _take(self, entry: Entry, text: str | None) -> None:
        if text is not None:
            self._texts[entry.update_id] = text
        if entry.step == "committed":
            self.active, self.pending = entry, None
        elif entry.step == "ended":
            self.pending = None
        else:
            self.pending = entry
        kept = {one.update_id for one in (self.active, self.pending) if one is not None}
        for name in self._texts.keys() - kept:
            del self._texts[name]


def _line(entry: Entry, text: str | None) -> str:
    # The manifest behind the entry as it is: its text must stay canonical to the byte.
    return entry.model_dump_json() + (f"{_BREAK}{text}" if text else "")
