"""Compares `contract.toml` with the wheels of the packages: `make test-contracts`.

The versions are pinned there, and what was read in them is kept in `read.json`, of which the page
of versions is made. A run reads the wheels again and fails where that differs, where a name is
missing that should be there, and where a wheel could not be had: what was not read is told as "not
tried", and is no success.

    python -m tests.contracts.check             # compare
    python -m tests.contracts.check --write     # and write what was read
    python -m tests.contracts.check --newest    # look at the newest versions of the index instead
"""

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contracts.reading import Found, Signature, Sources, slim

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTRACT, READ = HERE / "contract.toml", HERE / "read.json"
CACHE = ROOT / "build" / "contracts"
_TIMEOUT_S = 170.0


class NotTried(Exception):
    """A wheel could not be had, and why."""


@dataclass(frozen=True, slots=True)
class Feature:
    """What is needed for one purpose."""

    since: str
    names: tuple[str, ...]
    ours: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Package:
    """What is needed in one package, and in which versions."""

    name: str
    wheel: str
    extra: str | None
    versions: Mapping[str, str]  # oldest, tested, newest
    features: Mapping[str, Feature]


def contracts() -> dict[str, Package]:
    """Read `contract.toml`."""
    found = {}
    for key, given in tomllib.loads(CONTRACT.read_text("utf-8")).items():
        versions = {role: given[role] for role in ("oldest", "tested", "newest")}
        features = {
            name: Feature(
                one.get("since", given["oldest"]), tuple(one["names"]), one.get("ours", {})
            )
            for name, one in given["features"].items()
        }
        found[key] = Package(given["name"], given["wheel"], given.get("extra"), versions, features)
    return found


def numbers(version: str) -> tuple[int, ...]:
    """A version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


# ---- one line of the contract -------------------------------------------------------------------


def lacks(sources: Sources, line: str) -> str:
    """Why a package does not have what a line asks for; empty if it has."""
    causes = [_lacks(sources, one.strip()) for one in line.split(" | ")]
    return "" if "" in causes else causes[0]


def _lacks(sources: Sources, line: str) -> str:
    module, _, wanted = line.partition(":")
    asked = ast.parse(wanted, mode="eval").body
    if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
        return "" if sources.says(module, asked.value) else f"{module} does not say {wanted}"
    target = asked.func if isinstance(asked, ast.Call) else asked
    first, *rest = ast.unparse(target).split(".")
    found = sources.find(module, first)
    if found is None:
        return f"{module} has no {first}"
    for name in rest:
        found = sources.member(found, name)
        if found is None:
            return f"{module}:{first} has no {name}"
    if not isinstance(asked, ast.Call):
        return ""
    takes = sources.signature(found, is_method=bool(rest))
    if takes is None:
        return f"{module}:{ast.unparse(target)} is no function that can be read"
    refusal = takes.refusal(len(asked.args), {one.arg for one in asked.keywords if one.arg})
    return f"{module}:{ast.unparse(target)} {refusal}" if refusal else ""


@functools.cache
def own_sources() -> Sources:
    """The sources of rl_bridge."""
    return Sources.of_folder(ROOT, "rl_bridge")


def misfits(theirs: Sources, ours: Sources, own: str, other: str) -> Iterator[str]:
    """How a class of ours does not fit a class of theirs that it stands for, or below."""
    found = _class(theirs, other)
    mine = _class(ours, own)
    if found is None or mine is None:
        yield f"there is no {other if found is None else own}"
        return
    left = theirs.abstract(found)
    if any("Protocol" in ast.unparse(base) for base in _bases(found)):
        left = {name for name, _ in _methods(found)}
    for name in sorted(left):
        if ours.member(mine, name) is None:
            yield f"{other} asks for {name}, which {own} does not have"
    for one in theirs.lineage(found):
        for name, method in _methods(one):
            overrides = next((node for key, node in _methods(mine) if key == name), None)
            if name != "__init__" and overrides is not None:
                yield from _narrower(f"{other}.{name}", method, overrides)


def _narrower(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    wide, own = (_bound(method) for method in (theirs, ours))
    needed = wide.required - wide.only_by_name
    for count in {len([one for one in wide.names if one in needed]), len(wide.names)}:
        given = {one for one in wide.names[count:] if one in needed} | set(wide.only_by_name)
        if refusal := own.refusal(count, given):
            yield f"{name} is called in a way that ours refuses: it {refusal}"
            return


def _bound(method: Any) -> Signature:
    is_static = any(ast.unparse(one) == "staticmethod" for one in method.decorator_list)
    return Signature.of(method, is_bound=not is_static)


def _class(sources: Sources, name: str) -> Found | None:
    module, _, wanted = name.partition(":")
    return sources.find(module, wanted)


def _bases(found: Found) -> list[ast.expr]:
    return found.node.bases if isinstance(found.node, ast.ClassDef) else []


def _methods(found: Found) -> Iterator[tuple[str, Any]]:
    body = found.node.body if isinstance(found.node, ast.ClassDef) else []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node


# ---- wheels -------------------------------------------------------------------------------------


def sources_of(wheel: str, version: str) -> Sources:
    """The sources of a package's wheel, kept in `build/contracts` without the rest of it.

    Raises:
        NotTried: pip does not give it.

    """
    kept = CACHE / f"{wheel}-{version}.zip"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _pip(
                "download", "--no-deps", "--only-binary=:all:", "-d", folder, f"{wheel}=={version}"
            )
            slim(next(Path(folder).glob("*.whl")), kept)
    return Sources.of_wheel(kept)


def newest_of(wheel: str) -> str:
    """The newest version that the index has.

    Raises:
        NotTried: pip does not tell.

    """
    told = _pip("index", "versions", wheel)
    found = re.search(r"\(([^)]+)\)", told)
    if found is None:
        raise NotTried(f"pip told no version of {wheel}: {told[:200]!r}")
    return found[1]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotTried(f"pip did not end within {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NotTried(done.stderr.strip().rpartition("\n")[2] or "pip failed")
    return done.stdout


# ---- what was read ------------------------------------------------------------------------------

Missing = dict[str, list[str]]
"""Feature -> what is missing of it; empty if nothing is."""


def read(package: Package, sources: Sources, ours: Sources) -> Missing:
    """What a version lacks, by feature."""
    found: Missing = {}
    for name, feature in package.features.items():
        causes = [cause for line in feature.names if (cause := lacks(sources, line))]
        for own, other in feature.ours.items():
            causes += misfits(sources, ours, own, other)
        found[name] = causes
    return found


def complaints(package: Package, version: str, missing: Missing) -> list[str]:
    """What is missing that should be there, and what is there earlier than it is said to be."""
    told = []
    for name, causes in missing.items():
        since = package.features[name].since
        is_due = numbers(version) >= numbers(since)
        if causes and is_due:
            told += [f"{package.name} {version}, {name}: {cause}" for cause in causes]
        elif not causes and not is_due:
            told.append(f"{package.name} {version}, {name}: it is there, and not since {since}")
    return told


def recorded() -> dict[str, dict[str, Missing]]:
    """What was read last: package -> version -> `Missing`."""
    found: dict[str, dict[str, Missing]] = json.loads(READ.read_text("utf-8"))
    return found


def table(package: Package, versions: Mapping[str, Missing]) -> str:
    """A package's part of the page of versions."""
    roles: dict[str, list[str]] = {}
    for role, version in package.versions.items():
        roles.setdefault(version, []).append(role)
    heads = [f"{version} ({', '.join(names)})" for version, names in roles.items()]
    lines = [
        "| " + " | ".join([package.name, *heads]) + " |",
        "|" + "---|" * (1 + len(heads)),
    ]
    for name in package.features:
        cells = []
        for version in roles:
            causes = versions.get(version, {}).get(name)
            cells.append("not tried" if causes is None else "no" if causes else "read")
        lines.append("| " + " | ".join([name, *cells]) + " |")
    run = ["run" if "tested" in names else "not tried" for names in roles.values()]
    lines.append("| **run by the tests** | " + " | ".join(run) + " |")
    return "\n".join(lines)


def tables() -> str:
    """The generated part of the page of versions."""
    found = recorded()
    return "\n\n".join(table(one, found.get(key, {})) for key, one in contracts().items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Read all versions; returns 0 if everything is as it is said to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write read.json")
    parser.add_argument("--newest", action="store_true", help="read the index's newest versions")
    options = parser.parse_args(arguments)
    packages = contracts()
    found, told = read_all(packages, newest=options.newest)
    if not told and not options.newest:
        if options.write:
            READ.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        elif found != recorded():
            told.append(
                "what was read is not what read.json has. Look at the difference, and write it: "
                "python -m tests.contracts.check --write; python docs/_generate/write.py"
            )
    for line in told:
        sys.stderr.write(f"FAILED {line}\n")
    return 1 if told else 0


def read_all(
    packages: Mapping[str, Package], *, newest: bool = False
) -> tuple[dict[str, dict[str, Missing]], list[str]]:
    """Read the versions that are named, or the newest of each package in the index.

    Returns:
        Package -> version -> `Missing`; and what is not as it should be, a line for each.

    """
    found: dict[str, dict[str, Missing]] = {}
    told: list[str] = []
    ours = own_sources()
    wanted: list[tuple[str, str]] = []  # package, version; of none, the newest
    for key, package in packages.items():
        versions = {""} if newest else set(package.versions.values())
        wanted += [(key, version) for version in sorted(versions, key=numbers)]

    def of(key: str, version: str) -> tuple[str, Missing | NotTried]:
        wheel = packages[key].wheel
        try:
            version = version or newest_of(wheel)
            return version, read(packages[key], sources_of(wheel, version), ours)
        except NotTried as cause:
            return version or "(the newest)", cause

    with ThreadPoolExecutor(4) as pool:  # the network is waited for, mostly
        answers = pool.map(of, *zip(*wanted, strict=True))
        for (key, _), (version, missing) in zip(wanted, answers, strict=True):
            package = packages[key]
            if isinstance(missing, NotTried):
                told.append(f"{package.name} {version}: not tried: {missing}")
                continue
            found.setdefault(key, {})[version] = missing
            there = sum(not causes for causes in missing.values())
            sys.stdout.write(f"{package.name} {version}: {there} of {len(missing)} features\n")
            told += complaints(package, version, missing)
    return found, told


if __name__ == "__main__":
    sys.exit(main())
