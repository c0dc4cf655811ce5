"""Measures the transport nixl: `python benchmarks/nixl_reads.py [--quick] [--out FILE]`.

Owners and an engine in processes of their own on this machine, once over TCP and once as UCX
chooses. In turn, in one run: raw reads by NIXL of the very same bytes, and ours, from the manifest
of a sealed version to the verified import. README.md beside this file says how each figure comes
about. (Its name is not `nixl.py`: scripts in this folder would import that for the library.)
"""

import datetime as dt
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from _lib.memory import GIB, MIB, warm_up
from _lib.nixl_roles import Engine, Owner
from _lib.payload import PayloadSpec
from rich.console import Console
from rich.table import Table

from rl_bridge.testing.processes import Child

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "nixl.json"
_WARM_UP = 4
_LANES = {"tcp": "tcp", "default": ""}
_AIMS = {"read_vs_raw_tcp": 0.9, "read_vs_raw_default": 0.8}
_OWNERS = (1, 2, 4)
# Each with new processes; their order changes, so that a machine that gets slower does so for all.
_ROUNDS = ((1, 2, 4), (4, 1, 2), (2, 4, 1))
_COUNTS = (300, 10_000, 40_000)
_SMALL = "small"
_SMALL_COLS = 64
_Measured = tuple[dict[str, list[dict[str, float]]], dict[str, dict[str, int]]]
_TCPStore = torch._C._distributed_c10d.TCPStore  # noqa: SLF001 - has no other name


@dataclass
class Rig:
    """Owners and engines.

    Attributes:
        owners: by rank.
        engines: the readers, which read at the same time.
        version: the last one that was published.
        known: lanes whose layout the engine has.

    """

    owners: list[Child]
    engines: list[Child]
    version: int = 0
    known: set[str] = field(default_factory=set)

    def raw(self, lane: str, *, as_one: bool) -> float:
        """Read what is published now, raw."""
        places = [owner.call("raw_place", lane=lane, as_one=as_one) for owner in self.owners]
        for owner in self.owners:
            owner.call("help_raw", on=True)
        try:
            return max(map(float, self._all("raw_read", owners=places, as_one=as_one)))
        finally:
            for owner in self.owners:
                owner.call("help_raw", on=False)

    def _all(self, what: str, **given: Any) -> list[Any]:
        """Have all engines do the same at once."""
        for engine in self.engines:
            engine.tell(what, **given)
        return [engine.answer() for engine in self.engines]

    def publish(self, lane: str, *, as_group: bool) -> str:
        """Publish the next version, every byte new; returns its manifest."""
        self.version += 1
        what = "publish_part" if as_group else "publish"
        for owner in self.owners:
            owner.tell(what, lane=lane, version=self.version, layout=lane not in self.known)
        texts = {owner.answer() for owner in self.owners}
        self.known.add(lane)
        return str(texts.pop())

    def turn(self, lane: str, *, as_group: bool, swap: bool = False) -> dict[str, float]:
        """Publish a version; read it raw in two ways, and by us; let go of it.

        Tiny tensors are read raw as one range only: that is faster by far.
        """
        text = self.publish(lane, as_group=as_group)
        update = {"lane": lane, "version": self.version, "text": text}
        found: dict[str, float] = {}

        def ours() -> None:
            every = self._all("update_group" if as_group else "update", **update)
            found.update(max(every, key=lambda one: float(one["seconds"])))

        def raw() -> None:
            found["raw_one_s"] = self.raw(lane, as_one=True)
            if lane != _SMALL:
                found["raw_each_s"] = self.raw(lane, as_one=False)

        for step in (ours, raw) if swap else (raw, ours):
            step()
        for owner in self.owners:
            owner.call("release", lane=lane)
        return found


@contextmanager
def _rig(
    num: int,
    specs: dict[str, PayloadSpec],
    ucx: str,
    *,
    is_apart: bool = False,
    num_engines: int = 1,
) -> Iterator[Rig]:
    """Start processes; each owner has `1 / num` of the rows of every tensor.

    With `is_apart` no owner uses the engine's core, as if on another machine: else a message wakes
    an owner on the very core that sends it, and the engine waits for its own core.
    """
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = (cores[:1], cores[1:]) if is_apart and len(cores) > 1 else (cores, cores)
    parts = {
        lane: {"num_tensors": one.num_tensors, "rows": one.rows // num, "cols": one.cols}
        for lane, one in specs.items()
    }
    store = _TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        given = {"world_size": num, "port": store.port, "specs": parts, "ucx": ucx, "cores": theirs}
        owners = [stack.enter_context(Child(Owner, rank=rank, **given)) for rank in range(num)]
        engines = [
            stack.enter_context(Child(Engine, specs=parts, ucx=ucx, num_owners=num, cores=ours))
            for _ in range(num_engines)
        ]
        yield Rig([owner.ready() for owner in owners], [engine.ready() for engine in engines])


def _measure(rig: Rig, lane: str, reps: int, *, as_group: bool) -> _Measured:
    """Turns, and what the engine's transport made during those that count."""
    warm = [rig.turn(lane, as_group=as_group) for _ in range(_WARM_UP)]
    before = rig.engines[0].call("counters")[lane]
    rows = [rig.turn(lane, as_group=as_group, swap=bool(number % 2)) for number in range(reps)]
    after = rig.engines[0].call("counters")[lane]
    growth = {name: after[name] - before[name] for name in after}
    return {"samples": rows, "warmup_samples": warm}, {"made": after, "growth": growth}


def _median(rows: list[dict[str, float]], *names: str) -> float:
    """The smallest median among these columns."""
    return min(median(row[name] for row in rows) for name in names)


def _reads(nbytes: int, reps: int, console: Console) -> dict[str, Any]:
    found = {}
    for lane, ucx in _LANES.items():
        console.print(f"one owner, {lane}")
        with _rig(1, {"300": PayloadSpec.for_nbytes(nbytes)}, ucx) as rig:
            samples, counted = _measure(rig, "300", reps, as_group=False)
        rows = samples["samples"]
        raw, ours = _median(rows, "raw_one_s", "raw_each_s"), _median(rows, "seconds")
        found[f"read_vs_raw_{lane}"] = {
            "value": round(raw / ours, 3),
            "raw_s": raw,
            "ours_s": ours,
            "counters": counted,
            **samples,
        }
    return found


def _fan_in(nbytes: int, reps: int, console: Console) -> dict[str, Any]:
    spec = PayloadSpec.for_nbytes(nbytes, num_tensors=256)
    spec = PayloadSpec(num_tensors=256, rows=spec.rows // 4 * 4, cols=spec.cols)
    taken: dict[int, list[_Measured]] = {num: [] for num in _OWNERS}
    for number, order in enumerate(_ROUNDS):
        for num in order:
            console.print(f"fan-in from {num}, round {number + 1}")
            with _rig(num, {"fan": spec}, "tcp") as rig:
                taken[num].append(_measure(rig, "fan", -(-reps // len(_ROUNDS)), as_group=True))
    found: dict[str, Any] = {}
    for num, rounds in taken.items():
        samples = {key: [row for one, _ in rounds for row in one[key]] for key in rounds[0][0]}
        counted: dict[str, Counter[str]] = {"growth": Counter(), "made": Counter()}
        for _, counts in rounds:
            for kind, numbers in counts.items():
                counted[kind].update(numbers)
        seconds = _median(samples["samples"], "seconds")
        found[str(num)] = {
            "ours_s": seconds,
            "raw_s": _median(samples["samples"], "raw_one_s", "raw_each_s"),
            "counters": counted,
            **samples,
        }
        found[str(num)]["vs_one_owner"] = round(found["1"]["ours_s"] / seconds, 3)
    return found


def _two_readers(nbytes: int, reps: int, console: Console) -> dict[str, Any]:
    """The four ranks of a trainer, and the two of an engine, each of which reads all of it."""
    spec = PayloadSpec.for_nbytes(nbytes, num_tensors=256)
    spec = PayloadSpec(num_tensors=256, rows=spec.rows // 4 * 4, cols=spec.cols)
    console.print("fan-in from 4 into 2 readers")
    with _rig(4, {"fan": spec}, "tcp", num_engines=2) as rig:
        samples, counted = _measure(rig, "fan", reps, as_group=True)
    rows = samples["samples"]
    raw, ours = _median(rows, "raw_one_s", "raw_each_s"), _median(rows, "seconds")
    value = round(raw / ours, 3)
    return {"value": value, "raw_s": raw, "ours_s": ours, "counters": counted, **samples}


def _software(reps: int, console: Console) -> dict[str, Any]:
    found = {}
    for count in _COUNTS:
        console.print(f"cost of software, {count} tensors")
        spec = PayloadSpec(num_tensors=count, rows=4, cols=_SMALL_COLS // 4)
        for num, as_group in ((1, False), (2, True)):
            with _rig(num, {_SMALL: spec}, "", is_apart=True) as rig:
                samples, counted = _measure(rig, _SMALL, reps, as_group=as_group)
            rows = samples["samples"]
            cost = _median(rows, "import_s") - _median(rows, "raw_one_s")
            aim = 1e-3 + 1e-6 * count
            found[f"{count}_{'fan_in' if as_group else 'one_owner'}"] = {
                "ms": round(cost * 1e3, 3),
                "aim_ms": aim * 1e3,
                "aim_met": cost <= aim,
                "parse_ms": round(_median(rows, "parse_s") * 1e3, 3),
                "counters": counted,
                **samples,
            }
    return found


def _figures(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the documentation shows: value, aim, and whether it is met."""
    found = {name: _at_least(one["value"], _AIMS[name]) for name, one in document["reads"].items()}
    for num, one in document["fan_in"].items():
        if num != "1":
            found[f"fan_in_{num}_owners_vs_1"] = _at_least(one["vs_one_owner"], 1)
    if two := document["two_readers"]:
        found["fan_in_into_2_readers_vs_raw"] = _at_least(two["value"], 0.9)
    for name, one in document["software"].items():
        aim = f"<= {one['aim_ms']:g}"
        found[f"software_ms_{name}"] = {"value": one["ms"], "aim": aim, "aim_met": one["aim_met"]}
    parts = (*document["reads"].values(), *document["fan_in"].values())
    grown = [sum(one["counters"]["growth"].values()) for one in parts]
    if grown:
        made = sum(grown)
        found["made_after_warm_up"] = {"value": made, "aim": "0", "aim_met": made == 0}
    return found


def _at_least(value: float, aim: float) -> dict[str, Any]:
    return {"value": value, "aim": f">= {aim:g}", "aim_met": value >= aim}


def _show(document: dict[str, Any], console: Console) -> None:
    table = Table()
    for column in ("figure", "value", "aim", "met"):
        table.add_column(column)
    for name, one in document["figures"].items():
        table.add_row(name, str(one["value"]), one["aim"], "yes" if one["aim_met"] else "NO")
    for name, one in (*document["reads"].items(), *document["fan_in"].items()):
        table.add_row(f"{name}, raw and ours, ms", _ms(one["raw_s"]), _ms(one["ours_s"]), "")
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="64 MiB and fewer repetitions.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = _OUT,
    mib: Annotated[int | None, typer.Option(help="Another payload size.")] = None,
    reps: Annotated[int | None, typer.Option(help="Another number of repetitions.")] = None,
    only: Annotated[
        str, typer.Option(help="Some of it: reads, fan-in, two-readers, software.")
    ] = "reads,fan-in,two-readers,software",
) -> None:
    """Measure and write the results."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    nbytes = mib * MIB if mib else (64 * MIB if quick else GIB)
    repetitions = reps or (5 if quick else 11)
    chosen = only.split(",")
    document: dict[str, Any] = {
        "format": _FORMAT,
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "environment": collect_environment(),
        "warm_up": warm_up(8 * nbytes),
        "payload_nbytes": nbytes,
        "repetitions": repetitions,
        "reads": _reads(nbytes, repetitions, console) if "reads" in chosen else {},
        "fan_in": _fan_in(nbytes, repetitions, console) if "fan-in" in chosen else {},
        "two_readers": _two_readers(nbytes, repetitions, console)
        if "two-readers" in chosen
        else {},
        "software": _software(2 * repetitions, console) if "software" in chosen else {},
    }
    document["figures"] = _figures(document)
    document["seconds"] = round(time.monotonic() - started, 1)
    save(document, out)
    _show(document, console)
    console.print(f"{document['seconds']} s; all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
