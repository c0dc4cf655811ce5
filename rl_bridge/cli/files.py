"""`rl-bridge files`, `export` and `publish`: versions in a store, and checkpoints made of them.

A store is named by the url that the bridges of ``files`` are given. Nothing here needs a trainer.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from rl_bridge.bridge.bridges import GroupBridge, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.cli.inspect import moment, read_manifest
from rl_bridge.cli.screen import (
    error_document,
    facts,
    plain,
    say_json,
    screen,
    size,
    status_text,
    table,
    told,
)
from rl_bridge.errors import (
    ChecksumMismatch,
    VersionNotFound,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.trainers.checkpoint_files import read_checkpoint
from rl_bridge.transports.files.checking import CheckedFile, check_version
from rl_bridge.transports.files.checkpoint import is_config, require_free, write_checkpoint
from rl_bridge.transports.files.store import (
    StoredVersion,
    VersionStore,
    committed_headers,
    offered,
    parts_of,
    surplus,
    update_id_of,
)
from rl_bridge.transports.files.transport import Files
from rl_bridge.transports.registry import canonical_name

_ID_DIGITS = 12
_MIN_ID_DIGITS, _MIN_ID_DECIMALS = 4, 8  # a shorter decimal text is a version's number
_SHOWN = 20
_FILE_NBYTES = 5 << 30
_EVERYTHING = 1 << 62  # versions to keep
_LEASE_S = 60.0
_MIN_LEASE_S = 1.0  # below it a slow request makes a reader that lives look dead

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help="The run's store: the url= of its bridges, such as /mnt/share/run1.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
_WHICH = "A version's number, or the beginning of its update id"


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that can be imported, and the parts that hold its bytes."""

    stored: StoredVersion  # or a group's first part
    parts: list[StoredVersion]
    update_id: str

    @property
    def number(self) -> int:
        return self.stored.marker.weight_version

    def document(self, store: VersionStore) -> dict[str, JSONValue]:
        return {
            "weight_version": self.number,
            "update_id": self.update_id,
            "ranks": len(self.parts),
            "folders": [one.name for one in self.parts],
            "is_kept": any(store.is_kept(one.name) for one in self.parts),
            "nbytes": sum(_nbytes(store, one.name) for one in self.parts),
        }


def _store_of(url: str, *, lease_s: float = _LEASE_S) -> VersionStore:
    try:
        return Files(url=url, lease_s=lease_s).store
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _versions(store: VersionStore) -> list[_Version]:
    visible = store.visible()
    return [
        _Version(one, parts_of(one, visible), update_id_of(one, visible))
        for one in offered(visible)
    ]


def _chosen(store: VersionStore, wanted: str | None) -> _Version:
    """The version of that number, or else of an update id that begins so; None: the newest."""
    is_number = wanted is not None and wanted.isascii() and wanted.isdecimal()
    if wanted is not None and not is_number and len(wanted) < _MIN_ID_DIGITS:
        raise typer.BadParameter(
            f"{wanted!r} names no version. Expected its number, or at least {_MIN_ID_DIGITS} "
            f"characters of its update id ({_MIN_ID_DECIMALS} if all of them are digits)."
        )
    versions = _versions(store)
    found = versions[-1:]
    if wanted is not None:
        number = wanted.lstrip("0") or "0"
        found = [one for one in versions if is_number and str(one.number) == number]
        if not is_number or len(wanted) >= _MIN_ID_DECIMALS:
            prefix = wanted.lower()
            found = found or [one for one in versions if one.update_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{one.number} ({one.update_id[:_ID_DIGITS]})" for one in found or versions)
    if found:
        msg = (
            f"{wanted} names {len(found)} versions in {store}, expected one: {listed}. Give more "
            "of the update id."
        )
    elif versions:
        msg = f"{store} has no version {wanted}. Name one of those that are there: {listed}."
    else:
        msg = f"{store} has no version. Publish one, or name another url."
    raise VersionNotFound(msg)


def _nbytes(store: VersionStore, name: str) -> int:
    try:
        return sum(store.files(name).values())
    except WeightBridgeError:  # removed meanwhile
        return 0


def _sizes(files: Mapping[str, int]) -> Table:
    shown = table("file", "size")
    for name, nbytes in files.items():
        shown.add_row(plain(name), size(nbytes))
    return shown


# ---- ls ------------------------------------------------------------------------------------------


def ls(url: Url, as_json: AsJson = False) -> None:
    """List the versions of a store, in the order of their publication.

    A version of several ranks is listed once all of them have published it, as long as all its
    parts are there. Versions that publishers leave alone, because somebody said to keep them, are
    marked.
    """
    with told(as_json=as_json):
        store = _store_of(url)
        versions = _versions(store)
        read = [(one, *_read_manifest(store, one)) for one in versions]
        damaged = store.damaged()
    if as_json:
        said: list[JSONValue] = []
        for one, manifest, problem in read:
            document = one.document(store)
            if manifest is None:
                document["error"] = problem
            else:
                document |= {
                    "created_at": manifest.created_at,
                    "root": manifest.root,
                    "adapter": manifest.adapter and manifest.adapter.name,
                    "tensor_count": manifest.tensor_count,
                }
            said.append(document)
        say_json({"url": str(store), "versions": said, "damaged_markers": list(damaged)})
        return
    out = screen()
    for name in damaged:
        out.print(f"{plain(name)}: its marker is damaged, so it is no version.", markup=False)
    if not read:
        out.print(f"No version in {plain(str(store))}.", markup=False)
        return
    shown = table("version", "update", "tensors", "size", "ranks", "published", "notes")
    for one, manifest, problem in read:
        document = one.document(store)
        notes = ["kept"] if document["is_kept"] else []
        if manifest is None:
            notes.append(f"damaged: {plain(problem)}")
        elif manifest.adapter is not None:
            notes.append(f"adapter {plain(manifest.adapter.name)}")
        shown.add_row(
            str(one.number),
            one.update_id[:_ID_DIGITS],
            "?" if manifest is None else str(manifest.tensor_count),
            size(int(str(document["nbytes"]))),
            str(len(one.parts)),
            "" if manifest is None else moment(manifest.created_at).partition(" UTC")[0],
            ", ".join(notes),
        )
    out.print(shown)


def _read_manifest(
    store: VersionStore, version: _Version
) -> tuple[WeightUpdateManifest | None, str]:
    """The manifest, or what is wrong with it."""
    try:
        return store.manifest(version.stored), ""
    except (WeightBridgeError, ValueError) as error:
        return None, str(error)


# ---- show ----------------------------------------------------------------------------------------


def show(
    url: Url,
    version: Annotated[str, typer.Argument(metavar="VERSION", help=f"{_WHICH}.")],
    as_json: AsJson = False,
) -> None:
    """Show one version of a store: what it is, and its files."""
    with told(as_json=as_json):
        store = _store_of(url)
        one = _chosen(store, version)
        manifest = store.manifest(one.stored)
        files = [(part.name, store.files(part.name)) for part in one.parts]
    document = one.document(store)
    if as_json:
        say_json(
            {
                **document,
                "url": str(store),
                "root": manifest.root,
                "publisher_id": manifest.publisher_id,
                "source_worker": manifest.source_worker,
                "created_at": manifest.created_at,
                "adapter": manifest.adapter and manifest.adapter.name,
                "tensor_count": manifest.tensor_count,
                "is_read": any(store.is_leased(part.name) for part in one.parts),
                "files": [
                    {"folder": folder, "name": name, "nbytes": nbytes}
                    for folder, held in files
                    for name, nbytes in held.items()
                ],
            }
        )
        return
    rows: dict[str, str | Text] = {
        "version": Text(str(one.number), style="bold"),
        "update": one.update_id,
        "root": manifest.root,
        "publisher": manifest.publisher_id,
        "source": plain(manifest.source_worker),
        "created": moment(manifest.created_at),
        "tensors": str(manifest.tensor_count),
    }
    if manifest.adapter is not None:
        rows["adapter"] = plain(manifest.adapter.name)
    rows["stays"] = "until it is let go: it is kept" if document["is_kept"] else "in its turn"
    out = screen()
    out.print(facts(rows, title="Version"))
    for folder, held in files:
        out.print()
        out.print(Text(f"{folder} in {plain(str(store))}", style="bold"))
        out.print(_sizes(held))


# ---- verify --------------------------------------------------------------------------------------


def verify(
    url: Url,
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="VERSION", show_default=False, help=f"{_WHICH}; the newest unless given."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify every byte of a version in a store.

    Each file is compared with the version's manifest, and that with its marker. The exit code is 0
    only if all fits; else each file is named, and the tensors in it, whose bytes are other ones.
    Files that go along with the weights, such as config.json, are in no manifest: nothing is known
    of them. The version is not removed while it is read, and its publisher learns nothing of it.
    """
    with told(as_json=as_json):
        store = _store_of(url)
        one = _chosen(store, version)
        manifest = store.manifest(one.stored)
        checked = check_version(store, one.parts, manifest)
    wrong = [(file, fault) for file in checked for fault in file.faults]
    failure: ChecksumMismatch | None = None
    if wrong:
        file, fault = wrong[0]
        of_tensor = f"tensor {fault.tensor!r}: " if fault.tensor else ""
        more = f" (and {len(wrong) - 1} more faults)" if len(wrong) > 1 else ""
        failure = ChecksumMismatch(
            f"version {one.number}, {file.folder}/{file.name}: {of_tensor}{fault.what}{more}. "
            "Import another version, or publish this one again."
        )
    if as_json:
        say_json(
            {
                "status": "failed" if failure else "pass",
                "error": error_document(failure),
                "weight_version": one.number,
                "update_id": one.update_id,
                "root": manifest.root,
                "files": [_checked_document(file) for file in checked],
            }
        )
    else:
        _show_checked(one, manifest, checked)
    if failure is not None:
        raise failure


def _checked_document(file: CheckedFile) -> dict[str, JSONValue]:
    return {
        "folder": file.folder,
        "name": file.name,
        "nbytes": file.nbytes,
        "tensors": file.num_tensors,
        "status": "failed" if file.faults else "pass",
        "faults": [{"tensor": one.tensor, "what": one.what} for one in file.faults],
    }


def _show_checked(
    version: _Version, manifest: WeightUpdateManifest, checked: list[CheckedFile]
) -> None:
    out = screen()
    shown = table("file", "tensors", "size", "result")
    for file in checked:
        name = plain(file.name) if file.rank is None else f"rank {file.rank}: {plain(file.name)}"
        num = str(file.num_tensors) if file.num_tensors else ""
        shown.add_row(
            name, num, size(file.nbytes), status_text("failed" if file.faults else "pass")
        )
    out.print(shown)
    wrong = [(file, fault) for file in checked for fault in file.faults]
    for file, fault in wrong[:_SHOWN]:
        where = f"{file.name}, {fault.tensor}" if fault.tensor else file.name
        out.print(Text(f"{plain(where)}: {plain(fault.what)}", style="red"))
    if len(wrong) > _SHOWN:
        out.print(f"and {len(wrong) - _SHOWN} more (--json has them all)", markup=False)
    num_bad = sum(bool(file.faults) for file in checked)
    verdict = f"{num_bad} of {len(checked)} files differ" if num_bad else "every byte fits"
    rows: dict[str, str | Text] = {
        "result": Text.assemble(status_text("failed" if num_bad else "pass"), f": {verdict}"),
        "version": f"{version.number} (update {version.update_id})",
        "root": manifest.root,
    }
    out.print()
    out.print(facts(rows, title=""))


# ---- gc ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Left:
    """Something that is not to stay, and why; the outcome may be why it was left all the same."""

    name: str
    rank: int
    nbytes: int
    why: str
    outcome: str


def gc(  # noqa: PLR0917 - typer calls it by name
    url: Url,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=0, help="How many of the newest versions stay.")
    ] = 2,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=1,
            show_default=False,
            help="Versions that are multiples of it stay.",
        ),
    ] = None,
    lease_s: Annotated[
        float,
        typer.Option(
            "--lease-s",
            min=_MIN_LEASE_S,
            help="In an object store, how many seconds a lease lives whose reader says nothing: "
            "the lease_s= of readers and trainers. Where a lease itself says more, that counts. So "
            "long it waits where a version is leased.",
        ),
    ] = _LEASE_S,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be removed, and wait for no lease."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove older versions from a store, and what was not finished.

    It is what a publisher removes as it publishes, for all ranks. What somebody reads, or said to
    keep, stays. While a publisher lives, nothing is removed and the exit code is 1: it removes
    older versions itself, and may be writing what looks unfinished. Where nobody can tell whether
    one lives, what it has not released stays, and so does what is unfinished: end it first. In an
    object store the lease of a reader that was killed is told from others by waiting: it does not
    change.
    """
    with told(as_json=as_json):
        store = _store_of(url, lease_s=lease_s)
        left = _collect(store, keep_last, keep_every, dry_run=dry_run)
    gone = [one for one in left if one.outcome in {"removed", "would be removed"}]
    total = sum(one.nbytes for one in gone)
    if as_json:
        say_json(
            {
                "url": str(store),
                "dry_run": dry_run,
                "found": [asdict(one) for one in left],
                "total_nbytes": total,
            }
        )
        return
    out = screen()
    where = plain(str(store))
    if not left:
        out.print(f"Nothing to remove in {where}.", markup=False)
        return
    shown = table("name", "size", "why", "result")
    for one in left:
        shown.add_row(plain(one.name), size(one.nbytes), one.why, one.outcome)
    out.print(shown)
    done = "Would remove" if dry_run else "Removed"
    out.print(f"{done} {len(gone)} of {len(left)}, {size(total)}, from {where}.", markup=False)


def _collect(
    store: VersionStore, keep_last: int, keep_every: int | None, *, dry_run: bool
) -> list[_Left]:
    found: list[_Left] = []
    ranks = {one.marker.rank for one in store.visible()} | set(store.unfinished().values())
    with ExitStack() as held:
        is_sure = {
            rank: held.enter_context(store.without_publisher(rank)) for rank in sorted(ranks)
        }
        # Once more, now that publishers are out; and once for all ranks: when a group's first part
        # is removed, nothing tells any more that the others were published.
        visible, unfinished = store.visible(), store.unfinished()
        committed = committed_headers(visible)
        for rank in sorted(ranks):
            for one in surplus(visible, rank, keep_last=keep_last, keep_every=keep_every):
                marker = one.marker
                is_published = marker.part is None or marker.header in committed
                why = f"not of the newest {keep_last}" if is_published else "part of no version"
                found.append(_removed(store, one.name, rank, why, dry_run=dry_run))
        if store.lease_s is not None and not dry_run:
            found = _once_more(store, found, keep_last, keep_every)
        for name, rank in unfinished.items():
            nbytes = _nbytes(store, name)
            outcome = "would be removed" if dry_run else "removed"
            if not is_sure.get(rank):
                outcome = "left: a publisher may be writing it"
            elif not dry_run:
                store.discard(name)
            found.append(_Left(name, rank, nbytes, "unfinished", outcome))
        if any(one.outcome == "removed" for one in found):
            there = store.unfinished().keys() | {one.name for one in store.visible()}
            found = [
                replace(one, outcome="left: it cannot be removed")
                if one.outcome == "removed" and one.name in there
                else one
                for one in found
            ]
    return found


def _once_more(
    store: VersionStore, found: list[_Left], keep_last: int, keep_every: int | None
) -> list[_Left]:
    """Look again at what is leased: a lease that has not changed since is of a reader that is dead.

    The store goes on meanwhile, so what is to stay is decided anew: ranks that live may have
    published the version that a part belongs to.
    """
    names = [one.name for one in found if one.outcome == "being read"]
    if not names:
        return found
    time.sleep(store.longest_lease_s(names))
    visible = store.visible()
    surplus_names = {
        one.name
        for rank in {one.rank for one in found}
        for one in surplus(visible, rank, keep_last=keep_last, keep_every=keep_every)
    }

    def again(one: _Left) -> _Left:
        if one.outcome != "being read":
            return one
        if one.name not in surplus_names:
            return replace(one, outcome="left: it was published, or removed, meanwhile")
        return _removed(store, one.name, one.rank, one.why, dry_run=False)

    return [again(one) for one in found]


def _removed(store: VersionStore, name: str, rank: int, why: str, *, dry_run: bool) -> _Left:
    nbytes, outcome = _nbytes(store, name), "removed"
    if store.is_kept(name):
        outcome = "kept"
    elif store.is_leased(name):
        outcome = "being read"
    elif dry_run:
        outcome = "would be removed"
    elif not store.remove(name):
        outcome = "kept" if store.is_kept(name) else "being read"
    return _Left(name, rank, nbytes, why, outcome)


# ---- export --------------------------------------------------------------------------------------


def export(  # noqa: PLR0917 - typer calls it by name
    source: Annotated[
        str,
        typer.Argument(
            metavar="MANIFEST",
            show_default=False,
            help="A manifest's JSON in a file, - for standard input; or the url of a store.",
        ),
    ],
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", show_default=False, help="A new directory, or an empty one."
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"{_WHICH}, where MANIFEST is a store; the newest unless given.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="The store of the version, where the manifest is one of files."
        ),
    ] = None,
    segments: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            exists=True,
            file_okay=False,
            show_default=False,
            help="The publisher's directory=, where the manifest is one of shared-memory.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a checkpoint in Hugging Face's layout.

    Its manifest lies beside it. Every byte is verified on the way. A version that is live is read
    from its publisher, over the transport that the manifest names; one of several ranks is put
    together. The directory is there with all that belongs to it, on disk, or not at all. An adapter
    becomes what PEFT loads. Files that go along in a store, such as config.json, are taken along.
    """
    with told(as_json=as_json):
        configs: dict[str, bytes] = {}
        given = {"--version": version, "--url": url, "--directory": segments}
        if source == "-" or Path(source).is_file():
            manifest = read_manifest(Path(source))
            kinds = _transports_of(manifest)
            belongs = False, "files" in kinds, "shared-memory" in kinds
            _require_fitting(source, given, belongs)
            require_free(directory)
            if url is not None:
                store = _store_of(url)
                found = [one for one in _versions(store) if one.update_id == manifest.update_id]
                configs = _configs(store, found[-1]) if found else {}
        else:
            store = _store_of(source)
            if store.directory is not None and not store.directory.exists():
                raise WeightBridgeUnavailableError(
                    f"{source!r} is neither a manifest's file nor a store: nothing is there. Name "
                    "a file with a manifest's JSON, or the url of a store."
                )
            is_same = url is not None and str(_store_of(url)) == str(store)
            _require_fitting(source, given, (True, is_same, False))
            require_free(directory)
            url = source
            one = _chosen(store, version)
            manifest = store.manifest(one.stored)
            configs = _configs(store, one)
        options: dict[str, dict[str, object]] = {}
        if url is not None:
            options["files"] = {"url": url}
        if segments is not None:
            options["shared-memory"] = {"directory": segments}
        with _reader_of(manifest, options) as bridge:
            tensors = bridge.import_update(manifest)
            files = write_checkpoint(
                directory, manifest, tensors, configs=configs, file_nbytes=_FILE_NBYTES
            )
            del tensors
    if as_json:
        say_json(
            {
                "directory": str(directory),
                "weight_version": manifest.weight_version,
                "update_id": manifest.update_id,
                "root": manifest.root,
                "files": [{"name": name, "nbytes": nbytes} for name, nbytes in files.items()],
            }
        )
        return
    out = screen()
    out.print(_sizes(files))
    where = plain(str(directory))
    out.print(
        f"Version {manifest.weight_version} is in {where}, {size(sum(files.values()))}; "
        f"root {manifest.root}.",
        markup=False,
    )


def _configs(store: VersionStore, version: _Version) -> dict[str, bytes]:
    """The files that go along with a version, by name."""
    folder, suffix = version.stored.name, version.stored.marker.suffix
    names = {file.removesuffix(suffix): file for file in store.files(folder)}
    return {name: store.read_small(folder, file) for name, file in names.items() if is_config(name)}


def _transports_of(manifest: WeightUpdateManifest) -> set[str]:
    return {canonical_name(one.transport) for one in getattr(manifest, "parts", (manifest,))}


def _require_fitting(source: str, given: Mapping[str, object], belongs: tuple[bool, ...]) -> None:
    """Refuse options that do not belong to what is exported from."""
    for (option, value), fits in zip(given.items(), belongs, strict=True):
        if value is not None and not fits:
            raise typer.BadParameter(
                f"{option} {value} does not belong to {source}: --version is of a store, --url of "
                "a manifest of files, --directory of one of shared-memory. Leave it out."
            )


def _reader_of(
    manifest: WeightUpdateManifest, options: Mapping[str, Mapping[str, object]]
) -> TensorBridge:
    name = "rl-bridge-export"
    if "files" in _transports_of(manifest) and "files" not in options:
        raise WeightBridgeUnavailableError(
            f"version {manifest.weight_version} is in files, and a manifest does not say where. "
            "Name their store with --url."
        )
    if isinstance(manifest, GroupManifest):
        return GroupBridge(source_worker=name, transports=options)
    given: dict[str, Any] = dict(options.get(canonical_name(manifest.transport), {}))
    return make_weight_bridge(manifest.transport, source_worker=name, **given)


# ---- publish -------------------------------------------------------------------------------------


def publish(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY",
            exists=True,
            file_okay=False,
            show_default=False,
            help="A checkpoint: files of safetensors, or an adapter of PEFT's.",
        ),
    ],
    url: Annotated[
        str,
        typer.Option(
            show_default=False, help="The store: what engines' bridges are given as url=."
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Its number; one above the highest in the store unless given.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Name under which an adapter is published; the directory's unless given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint over files, for engines to install.

    Configuration and tokenizer are taken along, so the version is a checkpoint again. No version in
    the store is removed, and one that has the number already is not replaced. A directory whose
    trainer lives is refused; in an object store, where nobody can tell, the trainer is refused from
    then on.
    """
    with told(as_json=as_json):
        folder = directory.absolute()
        tensors, spec = read_checkpoint(folder, adapter_name=adapter or folder.name)
        if adapter is not None and spec is None:
            raise typer.BadParameter(
                f"--adapter {adapter} is of an adapter, but {directory} holds a whole model. Leave "
                "it out, or name an adapter's directory."
            )
        manifest = _publish(tensors, spec, folder, url, version)
    if as_json:
        say_json(
            {
                "url": url,
                "weight_version": manifest.weight_version,
                "update_id": manifest.update_id,
                "root": manifest.root,
                "adapter": manifest.adapter and manifest.adapter.name,
                "tensor_count": manifest.tensor_count,
                "total_nbytes": manifest.total_nbytes,
            }
        )
        return
    rows: dict[str, str | Text] = {
        "version": Text(str(manifest.weight_version), style="bold"),
        "update": manifest.update_id,
        "root": manifest.root,
        "tensors": f"{manifest.tensor_count}, {size(manifest.total_nbytes)}",
    }
    if manifest.adapter is not None:
        rows["adapter"] = plain(manifest.adapter.name)
    rows["store"] = plain(url)
    screen().print(facts(rows, title="Published"))


def _publish(
    tensors: Mapping[str, torch.Tensor],
    spec: AdapterSpec | None,
    folder: Path,
    url: str,
    version: int | None,
) -> WeightUpdateManifest:
    try:
        bridge = make_weight_bridge(
            "files",
            url=url,
            source_worker="rl-bridge-publish",
            config_dir=folder,
            keep_last=_EVERYTHING,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with bridge:
        # Before a publisher is there, which in an object store puts an earlier one out, and once
        # more behind it: another one may have published meanwhile.
        _require_unused(url, version)
        bridge.publisher  # noqa: B018 - from here on no other one publishes there
        _require_unused(url, version)
        return bridge.publish(tensors, weight_version=version, adapter=spec)


def _require_unused(url: str, version: int | None) -> None:
    """See to it that no version in the store has that number; None: that the next one is known.

    Raises:
        VersionNotMonotonic: one has it.
        WeightBridgeUnavailableError: a version cannot be looked at, so that nobody knows.

    """
    store = _store_of(url)
    if store.directory is not None and not store.directory.exists():
        return  # it is made now
    if version is None:
        store.last_number()
    elif version in (numbers := store.numbers()):
        raise VersionNotMonotonic(
            f"{store} has a version {version} already, expected a number that is not there. Give "
            f"another number, such as --version {max(numbers) + 1}, or none."
        )
