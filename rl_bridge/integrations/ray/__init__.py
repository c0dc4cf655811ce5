"""Ray places the parts and carries manifests and answers; weights take the bridge's transports."""

__all__: list[str] = []
