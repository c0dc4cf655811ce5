"""``files`` in object stores: over fsspec's local one the whole suite, and a server of S3."""

import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from moto.server import ThreadedMotoServer
from safetensors.torch import load

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.errors import (
    VersionNotFound,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate, locate_in_files
from rl_bridge.testing.processes import until
from rl_bridge.transports.files.objects import ObjectStore
from rl_bridge.transports.files.store import Marker
from rl_bridge.transports.files.transport import Files
from tests.transports.exclusive_files import ExclusiveFiles
from tests.transports.test_files import (
    assert_holds,
    publish,
    weights,
)


class ExclusiveTransport(Files):
    """Processes that open it import this module, which makes the urls known."""


class TestObjects(TransportSuite):
    transport_class = ExclusiveTransport
    locate: ClassVar[Locate] = staticmethod(locate_in_files)
    num_cycles = 10

    @pytest.fixture
    def transport_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "url": f"{ExclusiveFiles.protocol}://{tmp_path}/run",
            "storage_options": {"auto_mkdir": True},
            "keep_last": 0,
            "fenced": False,
            "timeout_s": 0.05,
            "lease_s": 1.0,
        }


# ---- a server of S3 ------------------------------------------------------------------------------

_runs = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    made = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def options(server: ThreadedMotoServer) -> dict[str, Any]:
    host, port = server.get_host_and_port()
    return {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}


@pytest.fixture
def bucket(options: dict[str, Any]) -> Any:
    made = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **options)
    made.makedirs("bucket", exist_ok=True)
    return made


@pytest.fixture
def url(bucket: Any) -> str:
    assert bucket.exists("bucket")
    return f"s3://bucket/run{next(_runs)}"


Open = Callable[..., FilesTensorBridge]


@pytest.fixture
def opened(url: str, options: dict[str, Any]) -> Open:
    return lambda **more: files(url, options, **more)


@pytest.fixture
def opened_here(tmp_path: Path) -> Open:
    """Over files of this machine, which are much faster, where nothing of S3's own is asked."""
    return lambda **more: files(f"exclusive://{tmp_path}/run", {"auto_mkdir": True}, **more)


def files(url: str, options: Mapping[str, object], **more: Any) -> FilesTensorBridge:
    more = {"timeout_s": 5.0, **more}
    bridge = make_weight_bridge("files", url=url, storage_options=options, suspicious="off", **more)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


def versions_in(bridge: FilesTensorBridge) -> list[int]:
    return [one.weight_version for one in bridge.versions()]


def test_the_objects_are_a_checkpoint(opened: Open, bucket: Any, url: str) -> None:
    with opened() as trainer:
        publish(trainer, 1)
        (path,) = bucket.glob(f"{url}/0*/model.safetensors")
        assert_holds(load(bucket.cat_file(path)), 1)


def test_a_trainer_that_comes_back_is_refused_and_what_it_began_is_removed(
    opened: Open, bucket: Any, url: str
) -> None:
    with opened() as older, opened() as newer:
        publish(older, 1)
        newer.publish(weights(5), weight_version=5)
        for _ in range(2):
            with pytest.raises(WeightBridgeUnavailableError, match="has taken over"):
                publish(older, 2)
        publish(newer, 6)
        assert versions_in(newer) == [1, 5, 6]  # the first is held by its trainer's lease
        assert len(bucket.glob(f"{url}/0*/model.safetensors")) == 3


def test_a_trainer_whose_versions_were_all_removed_goes_on(opened_here: Open) -> None:
    with opened_here(keep_last=0) as trainer:
        for version in (1, 2, 3):
            trainer.release(publish(trainer, version))
            assert versions_in(trainer) == []
        with opened_here(keep_last=0):
            publish(trainer, 4)  # a reader takes nothing over
        with opened_here(keep_last=0) as following:
            publish(following, 5)
        with pytest.raises(WeightBridgeUnavailableError, match="has taken over"):
            publish(trainer, 6)


def test_the_lease_of_a_reader_that_says_nothing_more_ends(
    opened: Open, url: str, bucket: Any
) -> None:
    with opened(keep_last=1, lease_s=0.3) as trainer:
        first = publish(trainer, 1)
        name = bucket.ls(f"{url}/leases", detail=False)[0].rsplit("/", 1)[-1]
        bucket.pipe_file(f"{url}/leases/{name}/of-a-killed-reader", b"7")
        trainer.release(first)
        publish(trainer, 2)
        assert 1 in versions_in(trainer)
        for version in range(3, 200):
            trainer.release(publish(trainer, version))
            if 1 not in versions_in(trainer):
                break
        else:
            pytest.fail("it was kept for good")
        assert not bucket.exists(f"{url}/leases/{name}/of-a-killed-reader")


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_lease_that_a_forked_child_takes_is_renewed(tmp_path: Path) -> None:
    there = {"auto_mkdir": True}
    url = f"exclusive://{tmp_path}/run"
    with files(url, there) as trainer:
        manifest = publish(trainer, 1)
        store = ObjectStore(url, storage_options=there, request_timeout_s=5.0, lease_s=0.3)
        name = store.find(manifest.update_id)
        is_taken, is_over = threading.Event(), threading.Event()

        def take_the_lock() -> None:
            with store.keeper._changed:
                is_taken.set()
                is_over.wait(60)

        # Renewed by a thread that no child has; and another one has its lock at the fork.
        with store.leased(name), ThreadPoolExecutor(1) as pool:
            pool.submit(take_the_lock)
            assert is_taken.wait(60)
            child = os.fork()
            if not child:
                try:
                    known = store.listed("leases", name)
                    with store.leased(name):
                        (own,) = set(store.listed("leases", name)) - set(known)
                        path = store.path("leases", name, own)
                        until(lambda: (store.text_at(path) or b"")[:2] == b"3 ", what="renewed")
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            is_over.set()
    assert not status


def test_a_reader_that_slept_past_its_lease_finds_the_version_gone_and_reads_the_newest(
    opened: Open, bucket: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        opened(keep_last=1) as trainer,
        opened(timeout_s=0.1, fetch_once=False, source_worker="reader") as reader,
    ):
        first = publish(trainer, 1)
        trainer.release(first)
        read, is_awake = ObjectStore.read, itertools.count()

        def late(store: ObjectStore, name: str, *given: Any) -> None:
            if not next(is_awake):
                for path in bucket.find(f"{url}/leases/{name}"):
                    bucket.rm_file(path)  # as its collector takes it for dead
                publish(trainer, 2)
                assert versions_in(trainer) == [2]
            read(store, name, *given)

        monkeypatch.setattr(ObjectStore, "read", late)
        with pytest.raises(VersionNotFound, match="Import"):
            reader.import_update(first)
        assert_holds(reader.import_update(reader.newest_verified() or ""), 2)


def test_an_earlier_trainer_that_ends_removes_nothing_that_a_later_one_is_writing(
    opened_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = opened_here()
    publish(older, 1)
    with opened_here() as newer, opened_here(source_worker="reader") as reader:
        publish(newer, 2)
        mark = ObjectStore.mark

        def late(store: ObjectStore, one: Marker) -> None:
            older.close()
            mark(store, one)

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "mark", late)
            manifest = publish(newer, 3)
        assert_holds(reader.import_update(manifest), 3)


@pytest.mark.parametrize("has_landed", [False, True])
def test_a_trainer_whose_marker_failed_is_fenced_by_the_next_one_and_fences_nobody(
    opened_here: Open, monkeypatch: pytest.MonkeyPatch, *, has_landed: bool
) -> None:
    with opened_here() as older:
        publish(older, 1)
        mark = ObjectStore.mark

        def failing(store: ObjectStore, one: Marker) -> None:
            if has_landed:
                mark(store, one)
            raise WeightBridgeUnavailableError("planted: no answer. Try again.")

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "mark", failing)
            with pytest.raises(WeightBridgeUnavailableError, match="planted"):
                publish(older, 2)
        with opened_here() as newer:
            publish(newer, 4)
            with pytest.raises(WeightBridgeUnavailableError, match="has taken over"):
                publish(older, 5)
            publish(newer, 6)
            assert versions_in(newer) == [1, 4, 6]


def test_a_version_that_is_kept_while_it_is_removed_stays(
    opened_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_here(keep_last=1) as trainer, opened_here(source_worker="reader") as reader:
        manifest = publish(trainer, 1)
        trainer.release(manifest)
        delete, is_kept = ObjectStore.delete, itertools.count()

        def late(store: ObjectStore, *paths: str, **options: Any) -> bool:
            if any("/STABLE/" in path for path in paths) and not next(is_kept):
                reader.keep(manifest)
            return delete(store, *paths, **options)

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "delete", late)
            publish(trainer, 2)
        publish(trainer, 3)
        assert versions_in(reader) == [1, 2, 3]
        assert_holds(reader.import_update(manifest), 1)


def test_a_version_whose_marker_goes_while_it_is_being_kept_has_it_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, bucket: Any, url: str
) -> None:
    with opened(keep_last=1) as trainer, opened(source_worker="reader") as reader:
        manifest = publish(trainer, 1)
        trainer.release(manifest)
        (marker,) = bucket.glob(f"{url}/STABLE/0-0000000002")
        put = ObjectStore.put

        def early(store: ObjectStore, path: str, content: bytes, **options: Any) -> None:
            if path.endswith("/KEEP"):
                bucket.rm_file(marker)
            put(store, path, content, **options)

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "put", early)
            reader.keep(manifest)
        publish(trainer, 2)
        publish(trainer, 3)
        assert versions_in(reader) == [1, 2, 3]


def test_a_marker_that_was_created_although_its_request_failed_blocks_nobody(
    opened_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_here() as trainer:
        publish(trainer, 1)
        create = ObjectStore.create

        def unanswered(store: ObjectStore, path: str, content: bytes) -> None:
            create(store, path, content)
            raise WeightBridgeUnavailableError("planted: no answer. Try again.")

        def unknown(*_: object) -> bytes:
            raise WeightBridgeUnavailableError("planted: no answer. Try again.")

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "create", unanswered)
            patched.setattr(ObjectStore, "text_at", unknown)
            patched.setattr(ObjectStore, "remove", unknown)
            for version in (2, 3):
                with pytest.raises(WeightBridgeUnavailableError, match="planted"):
                    publish(trainer, version)
        publish(trainer, 4)
        assert versions_in(trainer) == [1, 4]
        with opened_here() as newer:
            publish(newer, 5)
            with pytest.raises(WeightBridgeUnavailableError, match="has taken over"):
                publish(trainer, 6)


@pytest.fixture
def read_only(bucket: Any, url: str) -> Iterator[Callable[[], None]]:
    """Call it, and nobody may write below the url any more, until the test ends."""
    where = f"arn:aws:s3:::{url.removeprefix('s3://')}/*"
    denied = {"Effect": "Deny", "Principal": "*", "Resource": where}
    denied["Action"] = ["s3:PutObject", "s3:DeleteObject"]  # type: ignore[assignment]
    policy = json.dumps({"Version": "2012-10-17", "Statement": [denied]})
    yield lambda: bucket.call_s3("put_bucket_policy", Bucket="bucket", Policy=policy)
    bucket.call_s3("delete_bucket_policy", Bucket="bucket")


def test_a_reader_that_may_not_write_imports_without_a_lease_and_is_warned_once(
    opened: Open, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as trainer:
        for version in (1, 2):
            publish(trainer, version)
    read_only()
    with opened() as reader:
        for manifest in reader.versions():
            assert_holds(reader.import_update(manifest), manifest.weight_version)
            reader.acknowledge(manifest)
        with pytest.raises(WeightBridgeUnavailableError, match="PermissionError"):
            reader.keep(manifest)
        with pytest.raises(WeightBridgeUnavailableError, match="PermissionError"):
            publish(reader, 3)
    warned = [one for one in caplog.records if "may not write" in one.message]
    assert len(warned) == 1


def test_objects_without_bytes_are_no_markers_leases_or_records(
    opened: Open, bucket: Any, url: str
) -> None:
    """A console makes such an object for a folder; ranges of it are refused."""
    with opened(keep_last=1) as trainer, opened(source_worker="reader") as reader:
        manifest = publish(trainer, 1)
        (lease,) = bucket.glob(f"{url}/leases/*/*")
        key = url.removeprefix("s3://bucket/")
        for name in ("STABLE/", "leases/", "records/"):
            bucket.call_s3("put_object", Bucket="bucket", Key=f"{key}/{name}", Body=b"")
        for name in ("STABLE/_empty", "records/_empty", f"{lease.partition('/leases/')[2]}x"):
            where = name if "/_" in name else f"leases/{name}"
            bucket.pipe_file(f"{url}/{where}", b"")
        assert_holds(reader.import_update(manifest), 1)
        reader.acknowledge(manifest)
        assert [one.state for one in trainer.holders(manifest)] == ["acknowledged"]
        trainer.release(manifest)
        bucket.pipe_file(f"{url}/0000000009-{'a' * 12}/model.safetensors", b"x")
        publish(trainer, 2)
        assert versions_in(trainer)[-1] == 2
        assert not bucket.exists(f"{url}/0000000009-{'a' * 12}/model.safetensors")


def test_a_look_fetches_only_markers_that_were_not_read_before(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    call = ObjectStore.call

    def noted(store: ObjectStore, method: str, *given: Any, **options: Any) -> Any:
        if method == "cat_ranges":
            fetched.extend(path.rsplit("/", 1)[-1] for path in given[0] if "/STABLE/" in path)
        return call(store, method, *given, **options)

    with opened(keep_last=9) as trainer, opened(source_worker="reader") as reader:
        for version in (1, 2):
            publish(trainer, version)
        reader.versions()
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "call", noted)
            assert versions_in(reader) == [1, 2]
            assert fetched == []
        publish(trainer, 3)
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "call", noted)
            assert versions_in(reader) == [1, 2, 3]
            assert fetched == ["0-0000000004"]


# ---- faults between two requests -----------------------------------------------------------------


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_a_request_that_fails_is_an_error_and_the_version_before_stays(
    opened_here: Open, monkeypatch: pytest.MonkeyPatch, number: int, *, is_done: bool
) -> None:
    with opened_here() as trainer, opened_here(source_worker="reader") as reader:
        publish(trainer, 1)
        left = itertools.count(number, -1)
        call = ObjectStore.call

        def failing(store: ObjectStore, method: str, *given: Any, **options: Any) -> Any:
            is_due = not next(left)
            if is_done or not is_due:
                result = call(store, method, *given, **options)
            if is_due:
                raise WeightBridgeUnavailableError("planted: no network. Try again.")
            return result

        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "call", failing)
            published = None
            with_error = True
            try:
                published = publish(trainer, 2)
                with_error = False
            except WeightBridgeUnavailableError as error:
                assert "planted" in str(error)  # noqa: PT017 - or it went well
        assert next(left) < 0  # it came to that request
        found = reader.versions()
        for manifest in found:
            assert_holds(reader.import_update(manifest), manifest.weight_version)
        assert found[0].weight_version == 1
        assert with_error or published in found
        publish(trainer, 3)
        assert versions_in(reader)[-1] == 3


# ---- stores that are not what is needed ----------------------------------------------------------


class Late(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Shows what was written a few looks later, each object at another time."""

    protocol = "late"
    looks = 0
    delay = 20

    def _is_hidden(self, path: str) -> bool:
        Late.looks += 1
        known = _FIRST_SEEN.setdefault(path, Late.looks)
        return Late.looks - known < zlib.crc32(path.rsplit("/", 1)[-1].encode()) % Late.delay

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        found = super().ls(path, detail=True, **options)
        seen = [
            one for one in found if one["type"] == "directory" or not self._is_hidden(one["name"])
        ]
        return seen if detail else [one["name"] for one in seen]

    def cat_file(self, path: str, *given: Any, **options: Any) -> Any:
        if self._is_hidden(path):
            raise FileNotFoundError(path)
        return super().cat_file(path, *given, **options)


_FIRST_SEEN: dict[str, int] = {}


def test_objects_that_become_visible_late_and_in_any_order_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("late", Late, clobber=True)
    there = {"auto_mkdir": True}
    with (
        files(f"exclusive://{tmp_path}/run", there) as trainer,
        files(f"late://{tmp_path}/run", there, timeout_s=60.0, source_worker="reader") as reader,
        files(f"late://{tmp_path}/run", there, timeout_s=0.02, source_worker="hasty") as hasty,
    ):
        for version in range(1, 6):
            manifest = publish(trainer, version)
            assert_holds(reader.import_update(manifest), version)
        manifest = publish(trainer, 6)
        monkeypatch.setattr(Late, "delay", 10**9)
        with pytest.raises(VersionNotFound, match="not visible here yet"):
            hasty.import_update(manifest)


class Looking(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Creates a file as most of fsspec's file systems do: Hugging Face's hub, FTP, WebHDFS."""

    protocol = "looking"
    pipe_file = AbstractFileSystem.pipe_file


class Unwritten(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Has requests, but none of its own that creates an object."""

    protocol = "unwritten"


@pytest.mark.parametrize("kind", [Looking, Unwritten])
def test_a_store_that_looks_before_it_writes_is_refused_though_it_would_pass_a_trial(
    kind: type[AbstractFileSystem],
) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    with (
        files(f"{kind.protocol}://run", {}) as trainer,
        pytest.raises(WeightBridgeUnavailableError, match=f"{kind.__name__} of fsspec, which"),
    ):
        publish(trainer, 1)


def test_local_files_are_no_object_store_also_behind_another_file_system(tmp_path: Path) -> None:
    with files(f"local://{tmp_path}/run", {}) as trainer:
        for _ in range(2):
            with pytest.raises(WeightBridgeUnavailableError, match="LocalFileSystem of fsspec"):
                publish(trainer, 1)
    behind = {"target_protocol": "local", "path": str(tmp_path)}
    with (
        files("dir://run", behind) as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="DirFileSystem of fsspec"),
    ):
        publish(trainer, 1)


class Replacing(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Replaces an object that was to be created only if there is none."""

    protocol = "replacing"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        del mode
        return super().pipe_file(path, value, mode="overwrite", **options)


def test_a_store_without_conditional_writes_is_refused() -> None:
    fsspec.register_implementation("replacing", Replacing, clobber=True)
    with (
        files("replacing://run", {}) as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="could take one version's place"),
    ):
        publish(trainer, 1)


@pytest.mark.parametrize(
    ("there", "kind", "error"),
    [
        ("gs://bucket/run", WeightBridgeUnavailableError, "Install rl_bridge"),
        ("pigeon://bucket/run", ValueError, "a url that fsspec knows"),
    ],
)
def test_a_url_without_its_package_is_refused_by_name(
    there: str, kind: type[Exception], error: str
) -> None:
    with pytest.raises(kind, match=error):
        files(there, {})


def test_a_bucket_that_is_missing_and_a_server_that_is_gone_are_refused_by_name(
    options: dict[str, Any],
) -> None:
    with (
        files("s3://nobucket/run", options) as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="Make it, then"),
    ):
        publish(trainer, 1)
    with files("s3://nobucket/run", options, source_worker="reader") as reader:
        for look in (reader.newest, reader.versions, lambda: next(reader.watch())):
            with pytest.raises(WeightBridgeUnavailableError, match="the bucket of s3://nobucket"):
                look()
    gone = {**options, "endpoint_url": "http://127.0.0.1:9"}
    with (
        files("s3://bucket/run", gone, request_timeout_s=1.0) as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="See to the network"),
    ):
        publish(trainer, 1)
