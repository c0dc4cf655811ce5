"""A network's file system as another machine sees it: late, and in any order."""

import random
import shutil
from pathlib import Path


class SlowView:
    """A copy of a directory that follows it change by change, in an order that is drawn.

    A marker may be seen before the files that it stands for, a file with its first half alone, and
    what was removed may be seen for long. What of a change is seen is seen for good: a file that
    was replaced is never put together of both.

    Attributes:
        root: the view.

    """

    def __init__(self, source: Path, root: Path, seed: int) -> None:
        self.root, self._source = root, source
        self._draw = random.Random(seed)
        root.mkdir()

    def catch_up(self, steps: int | None = None) -> None:
        """Let so many changes be seen; None: until there are none left."""
        while steps is None or steps:
            there, here = _paths(self._source), _paths(self.root)
            changed = [one for one in there if here.get(one) != there[one]]
            gone = [one for one in here if one not in there]
            if not changed and not gone:
                return
            one = self._draw.choice(changed + gone)
            self._follow(self._source / one, self.root / one)
            steps = None if steps is None else steps - 1

    def _follow(self, source: Path, seen: Path) -> None:
        try:
            if source.is_dir():
                seen.mkdir(parents=True, exist_ok=True)
            elif source.exists():
                content = source.read_bytes()
                if self._draw.random() < 0.3 and not seen.exists():
                    content = content[: len(content) // 2]
                seen.parent.mkdir(parents=True, exist_ok=True)
                beside = seen.with_name(f"{seen.name}~")
                beside.write_bytes(content)
                beside.rename(seen)
            elif seen.is_dir():
                shutil.rmtree(seen)
            else:
                seen.unlink(missing_ok=True)
        except FileNotFoundError:  # it changed meanwhile
            return


def _paths(root: Path) -> dict[Path, bytes | None]:
    """What is below a directory: the content of files, None for directories."""
    found: dict[Path, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        try:
            found[path.relative_to(root)] = None if path.is_dir() else path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            continue
    return found
