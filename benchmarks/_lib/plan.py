"""What the benchmark runs, in full and in short."""

from dataclasses import dataclass, replace

from _lib.catalog import ARENA_LANES, PEER_LANES
from _lib.groups import Group
from _lib.lanes import LaneSpec
from _lib.memory import GIB, MIB
from _lib.payload import PayloadSpec

__all__ = ["MANY_TENSORS", "Plan", "fit", "make_plan", "needed_nbytes"]

# Payloads in memory at a group's worst moment, measured (`memory` of the rows), and rounded up:
# source, slots and engine of each lane that is beside others, or of all methods of a comparison.
_COPIES, _COPIES_OF_ALL = 4, 12
_PROCESSES_NBYTES = GIB  # two that have imported torch, and the one that measures

_OURS = "_lib.ours"
_WARMUP = 3
_SMALL_ROWS = 2
_MANY = 40_000
_FEW = 4

OURS = LaneSpec(
    name="ours",
    title="rl_bridge: published with digest, imported, every byte verified",
    module=_OURS,
    publisher="OursPublisher",
    consumer="ImportConsumer",
    verified=True,
)
OURS_FLIP = LaneSpec(
    name="ours_flip",
    title="rl_bridge: verified, installed by flip, proven, acknowledged",
    module=_OURS,
    publisher="OursPublisher",
    consumer="InstallConsumer",
    verified=True,
    options={"mode": "flip"},
)
OURS_COPY = LaneSpec(
    name="ours_copy",
    title="rl_bridge: verified, installed by copy, proven, acknowledged",
    module=_OURS,
    publisher="OursPublisher",
    consumer="InstallConsumer",
    verified=True,
    options={"mode": "copy", "time_copy": True},
)


_MANY_SPEC = PayloadSpec(num_tensors=_MANY, rows=_SMALL_ROWS, cols=1024)
_FEW_SPEC = PayloadSpec(num_tensors=_FEW, rows=_SMALL_ROWS * _MANY // _FEW, cols=1024)
MANY_TENSORS = replace(
    OURS_FLIP,
    name="many_tensors",
    title=f"{_MANY} small tensors, whole update",
    spec=_MANY_SPEC,
)
_FEW_TENSORS = replace(
    OURS_FLIP, name="few_tensors", title=f"the same bytes in {_FEW} tensors", spec=_FEW_SPEC
)
_MANY_IMPORT = replace(
    OURS,
    name="many_import",
    title=f"{_MANY} small tensors, import only",
    options={"import_only": True},
    spec=_MANY_SPEC,
)


def _flip(name: str, nbytes: int) -> LaneSpec:
    spec = PayloadSpec.for_nbytes(nbytes)
    return replace(OURS_FLIP, name=name, title=f"flip of {nbytes / MIB:.0f} MiB", spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Groups in the order in which they run, and what they need."""

    quick: bool
    payload: PayloadSpec
    core: Group
    peers: Group
    ray: Group
    sizes: Group
    flips: tuple[Group, ...]
    first_plans: int
    warm_up_nbytes: int

    def groups(self) -> list[Group]:
        """Return every group."""
        return [self.core, self.peers, self.ray, self.sizes, *self.flips]


def make_plan(*, quick: bool, payload_nbytes: int | None = None) -> Plan:
    """Return the plan of a full run (1 GiB) or a quick one (256 MiB, under a minute)."""
    nbytes = payload_nbytes or (256 * MIB if quick else GIB)
    spec = PayloadSpec.for_nbytes(nbytes)
    measured_ours = replace(OURS, options={"time_memcpy": True, "time_xxh3": True})
    without_ray = tuple(lane for lane in PEER_LANES if lane.requires is None)
    with_ray = tuple(lane for lane in PEER_LANES if lane.requires is not None)

    def group(name: str, lanes: tuple[LaneSpec, ...], reps: int) -> Group:
        return Group(name=name, spec=spec, lanes=lanes, warmup=2 if quick else _WARMUP, reps=reps)

    # Ray brings processes of its own, which would take turns on the cores of everybody else.
    beside = (*ARENA_LANES, OURS, OURS_FLIP)
    peer_reps = 2 if quick else 5
    ray = replace(group("ray", (*beside, *with_ray), peer_reps), needs_all=True)
    reps_flip = 3 if quick else 7
    sizes_flip = (_flip("flip_64mib", 64 * MIB), _flip("flip_1200mib", 1200 * MIB))
    # A flip of a size needs three times that in memory: touching it takes longer than a quick run.
    flips = [group("flips", sizes_flip[:1] if quick else sizes_flip, reps_flip)]
    if not quick:
        flips.append(group("flip_4gib", (_flip("flip_4gib", 4 * GIB),), reps_flip))
    return Plan(
        quick=quick,
        payload=spec,
        core=group("core", (*ARENA_LANES, measured_ours, OURS_FLIP, OURS_COPY), 4 if quick else 15),
        peers=group("peers", (*beside, *without_ray), peer_reps),
        ray=ray,
        sizes=group("sizes", (MANY_TENSORS, _FEW_TENSORS, _MANY_IMPORT), 2 if quick else 11),
        flips=tuple(flips),
        first_plans=0 if quick else 4,
        # The largest group holds its payload about a dozen times over, a flip of 4 GiB three times;
        # more than that, because the kernel does not always hand out the same pages again.
        warm_up_nbytes=max((8 if quick else 16) * spec.nbytes, 2 * GIB if quick else 16 * GIB),
    )


def needed_nbytes(group: Group) -> int:
    """Return about how much memory a group takes at its worst moment."""
    own = [lane.spec.nbytes for lane in group.lanes if lane.spec is not None]
    payloads = _COPIES * sum(own) if own else _COPIES_OF_ALL * group.spec.nbytes
    return payloads + _PROCESSES_NBYTES


def fit(plan: Plan, available_nbytes: int) -> tuple[Plan, list[Group]]:
    """Leave out flips for which there is not enough memory.

    Returns:
        What is left of the plan, and what was left out.

    Raises:
        MemoryError: there is not enough for the rest; the text says what to do.

    """
    left_out = [group for group in plan.flips if needed_nbytes(group) > available_nbytes]
    kept = replace(plan, flips=tuple(group for group in plan.flips if group not in left_out))
    most = max(map(needed_nbytes, kept.groups()))
    if most > available_nbytes:
        msg = (
            f"needs about {most / GIB:.1f} GiB of memory, {available_nbytes / GIB:.1f} GiB are "
            "available: the kernel would kill it, or another process. End other processes, or "
            "measure less: --quick (make bench QUICK=1), or --mib 128."
        )
        raise MemoryError(msg)
    return kept, left_out
