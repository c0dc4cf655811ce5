"""What became of a sync on each rank of the trainer: told to all, so that all know the same."""

from dataclasses import dataclass

from rl_bridge.bridge.group_exchange import GroupExchange
from rl_bridge.errors import GroupAborted, MalformedManifest
from rl_bridge.manifest.canonical import canonical_json, decode_json

__all__ = ["Outcome", "share_json", "share_outcome"]

_MAX_REASON = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sync on one rank.

    Attributes:
        failure: what failed; empty where nothing did.

    """

    failure: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing failed."""
        return not self.failure


def share_json(
    exchange: GroupExchange, step: str, body: dict[str, object], *, timeout_s: float
) -> list[dict[str, object]]:
    """Give a JSON object and get everybody's, by rank; nothing is unpickled.

    Raises:
        GroupAborted: not all ranks came in time.
        MalformedManifest: a rank sent no JSON object.

    """
    payload = canonical_json(body).encode("ascii")
    found = []
    for rank, data in enumerate(exchange.gather(step, payload, timeout_s=timeout_s)):
        text = data.decode("ascii", errors="replace")
        value, end = decode_json(text)
        if not isinstance(value, dict) or end != len(text):
            msg = (
                f"rank {rank} sent {text[:80]!r} in step {step!r}, expected a JSON object. Use the "
                "same rl_bridge release on every rank."
            )
            raise MalformedManifest(msg)
        found.append(value)
    return found


def share_outcome(exchange: GroupExchange, outcome: Outcome, *, timeout_s: float) -> None:
    """Tell the other ranks what became of a sync here, and hear the same of them.

    Raises:
        GroupAborted: this rank's part is well and another one's is not, or did not come in time.

    """
    body: dict[str, object] = {"failure": outcome.failure[:_MAX_REASON]}
    try:
        bodies = share_json(exchange, "outcome", body, timeout_s=timeout_s)
    finally:
        exchange.decide("over")  # whoever still waits for this sync need not wait any longer
    failed = {
        rank: str(one.get("failure")) for rank, one in enumerate(bodies) if one.get("failure")
    }
    if failed and outcome.is_good:
        rank, why = next(iter(failed.items()))
        msg = (
            f"the sync failed on rank {rank}: {why}. This rank's part of it was done. Mend the "
            "cause, then sync again."
        )
        raise GroupAborted(msg, tuple(failed))
