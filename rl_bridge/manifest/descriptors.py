"""What users see as ``manifest.tensors``: the layout's columns, read as one object per tensor."""

from collections.abc import Iterator, Mapping

from rl_bridge.manifest.table import TensorDescriptor, TensorTable

__all__ = ["DescriptorMap"]


class DescriptorMap(Mapping[str, TensorDescriptor]):
    """Name -> `TensorDescriptor`, each made when it is asked for."""

    def __init__(self, table: TensorTable, digests: bytes) -> None:
        """Look at `table` and the digest block; nothing is copied."""
        self._table = table
        self._digests = digests

    def __getitem__(self, name: str) -> TensorDescriptor:
        """Describe one tensor."""
        return self._table.descriptor(name, self._digests)

    def __iter__(self) -> Iterator[str]:
        """Go over the names, stored ones first, each part sorted."""
        return iter(self._table.rows)

    def __len__(self) -> int:
        """Count the names, tied ones included."""
        return len(self._table.rows)

    def __repr__(self) -> str:
        """Say how many there are rather than listing them all."""
        return f"<{len(self)} tensor descriptors>"
