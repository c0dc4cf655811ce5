"""fsspec's local file system, with the one thing that it lacks: it creates a file exclusively."""

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class ExclusiveFiles(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Urls such as ``exclusive:///tmp/run``: an object store in a directory."""

    protocol = "exclusive"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        if mode != "create":
            return super().pipe_file(path, value, mode=mode, **options)
        self.makedirs(self._parent(path), exist_ok=True)
        with self.open(path, "xb") as file:
            return file.write(value)


fsspec.register_implementation("exclusive", ExclusiveFiles, clobber=True)
