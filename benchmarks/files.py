"""Measures versions in files: `python benchmarks/files.py [--quick] [--folder DIR]`.

A model of some 2 GB in 300 tensors, on a disk: publishing over ``files`` beside writing the same
tensors with safetensors and syncing them; importing with verification beside safetensors' loading
of the file and plain reads of it into memory; and importing by a second reader of the host beside
an import over shared memory; in turn in one run. README.md beside this file says how each figure
comes about.
"""

import datetime as dt
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.alternating import alternate, timed
from _lib.environment import collect_environment, save
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "files.json"
_LAYERS, _WIDTH = 42, 2048
_QUICK_LAYERS = 2


def _weights(layers: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(layers):
        for name, rows in (("q", 1), ("k", 1), ("v", 1), ("o", 1), ("gate", 1), ("up", 1)):
            shape = (rows * _WIDTH, _WIDTH)
            tensor = torch.randn(shape, generator=draw).to(torch.bfloat16)
            found[f"layers.{layer}.{name}.weight"] = tensor
        found[f"layers.{layer}.norm.weight"] = torch.ones(_WIDTH, dtype=torch.bfloat16)
    return found


class _Bench:
    """Both ways to write a version, and three to read it."""

    def __init__(self, folder: Path, layers: int) -> None:
        from rl_bridge.bridge import FilesTensorBridge, SharedMemoryTensorBridge

        self.folder, self.weights = folder, _weights(layers)
        self.nbytes = sum(one.nbytes for one in self.weights.values())
        self.trainer = FilesTensorBridge(
            url=folder / "run", suspicious="off", nonfinite="warn", keep_last=1
        )
        self.reader = FilesTensorBridge(url=folder / "run")
        self.second = FilesTensorBridge(url=folder / "run")
        self.publisher = SharedMemoryTensorBridge(suspicious="off", nonfinite="warn")
        self.consumer = SharedMemoryTensorBridge()
        self.shared = self.publisher.publish(self.weights, weight_version=1)
        self.count = self.plain_count = 0
        self.plain = folder / "plain-0" / "model.safetensors"
        self.arena = bytearray(self.nbytes + (1 << 20))
        self.held: Any = None

    def _change(self) -> None:
        for one in self.weights.values():
            one.view(torch.int16)[0] += 1

    def publish(self, which: int) -> dict[str, Any]:
        """Over files: digests, durable, visible."""
        del which
        self.count += 1
        self._change()
        made: list[Any] = []
        os.sync()  # what others wrote is not this one's to wait for
        seconds = timed(
            lambda: made.append(self.trainer.publish(self.weights, weight_version=self.count))
        )
        if self.held is not None:
            self.trainer.release(self.held)
        self.held = made[0]
        return {"publish_s": seconds}

    def plain_write(self, which: int) -> dict[str, Any]:
        """The same tensors by safetensors, synced with their directory; the older file goes then.

        As for versions: what is written takes new pages, and not those of the file before.
        """
        del which
        from safetensors.torch import save_file

        self._change()
        self.plain_count += 1
        folder = self.folder / f"plain-{self.plain_count}"
        folder.mkdir()
        path = folder / "model.safetensors"

        def write() -> None:
            save_file(self.weights, path)
            for one in (path, folder):
                descriptor = os.open(one, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        os.sync()
        seconds = timed(write)
        shutil.rmtree(self.plain.parent, ignore_errors=True)
        self.plain = path
        return {"write_s": seconds}

    def read(self, which: int) -> dict[str, Any]:
        """Import, with all digests."""
        del which
        manifest = self.held
        seconds = timed(lambda: self.reader.import_update(manifest))
        return {"import_s": seconds}

    def read_second(self, which: int) -> dict[str, Any]:
        """Import what another reader of this host has fetched, with all digests."""
        del which
        manifest = self.held
        seconds = timed(lambda: self.second.import_update(manifest))
        self.second.release_imported(manifest)
        self.reader.release_imported(manifest)
        return {"second_s": seconds}

    def read_shared(self, which: int) -> dict[str, Any]:
        """Import the same tensors over shared memory, with all digests."""
        del which
        seconds = timed(lambda: self.consumer.import_update(self.shared))
        self.consumer.release_imported(self.shared)
        return {"shared_s": seconds}

    def load_file(self, which: int) -> dict[str, Any]:
        """Load by safetensors, and copy out of its mapping: every byte is read."""
        del which
        from safetensors.torch import load_file

        return {"load_s": timed(lambda: [one.clone() for one in load_file(self.plain).values()])}

    def plain_read(self, which: int) -> dict[str, Any]:
        """Read the file into memory that was written before."""
        del which
        memory = memoryview(self.arena)

        def read() -> None:
            with self.plain.open("rb", buffering=0) as file:
                at = 0
                while at < len(memory) and (count := file.readinto(memory[at:])):
                    at += count

        return {"read_s": timed(read)}

    def close(self) -> None:
        """Close the bridges."""
        for one in (self.second, self.reader, self.trainer, self.consumer, self.publisher):
            one.close()


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Turns that count.")] = 7,
    warmups: Annotated[int, typer.Option(min=1, help="Turns before.")] = 2,
    folder: Annotated[Path | None, typer.Option(help="Where the files go.")] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure versions in files beside plain files."""
    console = Console()
    began, environment = dt.datetime.now(dt.UTC), collect_environment()
    with tempfile.TemporaryDirectory(dir=folder) as home, torch.no_grad():
        bench = _Bench(Path(home), _QUICK_LAYERS if quick else _LAYERS)
        lanes = {
            "publish": bench.publish,
            "plain_write": bench.plain_write,
            "import": bench.read,
            "second_import": bench.read_second,
            "shared_memory": bench.read_shared,
            "load_file": bench.load_file,
            "plain_read": bench.plain_read,
        }
        samples = alternate(lanes, warmups, reps, console)
        bench.close()

    def mid(lane: str, name: str) -> float:
        return float(median(sample[name] for sample in samples[lane]))

    publish, write = mid("publish", "publish_s"), mid("plain_write", "write_s")
    read = mid("import", "import_s")
    best = min(mid("load_file", "load_s"), mid("plain_read", "read_s"))
    second, shared = mid("second_import", "second_s"), mid("shared_memory", "shared_s")
    ratios = {
        "plain_write_vs_publish": write / publish,
        "plain_read_vs_import": best / read,
        "shared_memory_vs_second_import": shared / second,
        "publish_s": publish,
        "write_s": write,
        "import_s": read,
        "load_s": mid("load_file", "load_s"),
        "read_s": mid("plain_read", "read_s"),
        "second_s": second,
        "shared_s": shared,
    }
    document = {
        "format": 1,
        "began": began.isoformat(timespec="seconds"),
        "environment": environment,
        "quick": quick,
        "warmups": warmups,
        "total_nbytes": bench.nbytes,
        "tensors": len(bench.weights),
        "ratios": ratios,
        "samples": samples,
    }
    save(document, out)
    table = Table("figure", "value", title=f"versions in files, {reps} turns")
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)
