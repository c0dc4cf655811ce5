"""The transport ``files``: versions as directories that everybody can read, and that outlive both.

`rl_bridge.transports.files.checkpoint` says where each tensor lies in files of safetensors,
`rl_bridge.transports.files.store` what a place for versions promises, and
`rl_bridge.transports.files.transport` has both ends.
"""

__all__: list[str] = []
