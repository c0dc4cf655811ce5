"""Use cases: publishing, consuming, and the rollout executor's transaction."""

__all__: list[str] = []
