"""Which versions of a store are offered, and which are not to stay: markers alone tell it.

A version that one publisher published whole is offered once it is visible. One that several ranks
published is offered once the marker of any part says that all ranks have, as long as all parts are
there: each part's marker has the group's header.
"""

import math
from collections.abc import Collection, Iterable

from rl_bridge.manifest.group import group_update_id
from rl_bridge.transports.files.store import Marker, StoredVersion, rank_of

__all__ = ["committed_headers", "offered", "orphans", "parts_of", "surplus", "update_id_of"]


def committed_headers(visible: Iterable[StoredVersion]) -> set[str]:
    """The headers of groups that all ranks published."""
    return {one.marker.header for one in visible if one.marker.is_committed}


def offered(visible: Iterable[StoredVersion]) -> list[StoredVersion]:
    """Those that can be imported, in the given order; a group's first part stands for the group."""
    visible = list(visible)
    committed = committed_headers(visible)

    def is_whole(group: Marker, first: StoredVersion) -> bool:
        return group.header in committed and len(parts_of(first, visible)) == group.world_size

    return [
        one
        for one in visible
        if one.marker.part is None or (one.marker.part == 0 and is_whole(one.marker, one))
    ]


def parts_of(version: StoredVersion, visible: Iterable[StoredVersion]) -> list[StoredVersion]:
    """The versions that hold the bytes of an offered one: its parts, by rank, or itself."""
    marker = version.marker
    if marker.part is None:
        return [version]
    found = {
        one.marker.part: one
        for one in visible
        if one.marker.part is not None and one.marker.header == marker.header
    }
    return [found[place] for place in range(marker.world_size) if place in found]


def update_id_of(version: StoredVersion, visible: Iterable[StoredVersion]) -> str:
    """The update that an offered version is of: a group's, where it stands for one."""
    if version.marker.part is None:
        return version.marker.update_id
    return group_update_id(one.marker.update_id for one in parts_of(version, visible))


def orphans(visible: Iterable[StoredVersion], unmarked: Iterable[str] = ()) -> list[StoredVersion]:
    """Parts of groups whose first part is not there: nothing can be made of them any more.

    For the publisher of first parts. A part that is being published is among them until the first
    one is there; it is leased.

    Args:
        visible: all versions of the store.
        unmarked: names of what has no marker, or none that is seen here yet. Where a first part of
            a version's number is among them, its other parts are no orphans.

    """
    visible = list(visible)
    firsts = {one.marker.header for one in visible if one.marker.part == 0}
    numbers = {int(name.partition("-")[0]) for name in unmarked if rank_of(name) == 0}
    return [
        one
        for one in visible
        if one.marker.part
        and one.marker.header not in firsts
        and one.marker.weight_version not in numbers
    ]


def surplus(
    visible: Iterable[StoredVersion],
    rank: int,
    *,
    keep_last: int,
    keep_every: int | None,
    joined: Collection[str] = (),
) -> list[StoredVersion]:
    """Versions of a rank that are not to stay.

    Ranks that are given the same numbers find the same versions. Parts of groups that were not
    published are among them, and do not count.

    Args:
        visible: all versions of the store, in the order of their publication.
        rank: the publisher's.
        keep_last: how many of the newest stay.
        keep_every: versions that are multiples of it stay.
        joined: updates of parts whose groups are known to be published, whatever markers say yet.

    """
    visible = list(visible)
    committed = committed_headers(visible)
    whole = {one.marker.header for one in offered(visible)}
    published: list[StoredVersion] = []
    counted: list[StoredVersion] = []
    found: list[StoredVersion] = []
    for one in visible:
        marker = one.marker
        if marker.rank == rank:
            is_joined = marker.part is None or marker.update_id in joined
            is_published = is_joined or marker.header in committed
            (published if is_published else found).append(one)
            # A group of which a part is lost must not take the place of one that can be read.
            if is_joined or marker.header in whole:
                counted.append(one)
    newest = counted[-keep_last:] if keep_last else []
    since = newest[0].marker.sequence if newest else math.inf
    return found + [
        one
        for one in published
        if one.marker.sequence < since
        and (not keep_every or one.marker.weight_version % keep_every)
    ]
