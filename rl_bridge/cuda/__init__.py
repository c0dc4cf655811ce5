"""Memory of a GPU: CUDA virtual memory, IPC handles, digests on the device, and host stand-ins."""

__all__: list[str] = []
