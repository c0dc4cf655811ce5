"""For whoever writes a transport or an installer: conformance suites, faults, leak checks."""

__all__: list[str] = []
