"""The side-car against its own OpenAPI description: whatever fits it, or does not, is answered."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks

from rl_bridge import TensorBridge
from rl_bridge.remote.gate import OPEN_PATHS
from rl_bridge.remote.signing import read_key
from tests.helpers import weights
from tests.remote.process import SidecarProcess

EXAMPLES = 40
SEED = 20_261_122
OPERATIONS = [
    ("post", "/updates"),
    ("get", "/updates/{update_id}"),
    ("post", "/updates/{update_id}/prepare"),
    ("post", "/updates/{update_id}/commit"),
    ("post", "/updates/{update_id}/abort"),
    ("get", "/status"),
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/metrics"),
]
CHECKS: list[Any] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


class Signing:
    """Signs what the fuzzer made, whatever it is."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.key = read_key(sidecar.key_file)

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body: Any = request.body or b""
        data = body.encode() if isinstance(body, str) else body
        given = self.key.sign(str(request.method), request.path_url, data, time=int(time.time()))
        request.headers["Authorization"] = given.header()
        return request


@pytest.fixture(scope="module")
def session(shared: SidecarProcess) -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        made.auth = Signing(shared)
        yield made


def described(shared: SidecarProcess) -> Any:
    found = requests.get(f"{shared.url}/openapi.json", timeout=30)
    return schemathesis.openapi.from_dict(found.json())


def test_every_operation_is_fuzzed(shared: SidecarProcess) -> None:
    operations = [made.ok() for made in described(shared).get_all_operations()]
    found = {(operation.method.lower(), operation.path) for operation in operations}
    assert found == set(OPERATIONS)


CASES = [
    pytest.param(operation, mode, id=f"{' '.join(operation)} {mode.value}")
    for operation in OPERATIONS
    for mode in schemathesis.GenerationMode
    # What is open takes nothing: there is nothing that could be wrong.
    if operation[1] not in OPEN_PATHS or mode is not schemathesis.GenerationMode.NEGATIVE
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_every_answer_is_one_that_is_described(
    operation: tuple[str, str],
    mode: schemathesis.GenerationMode,
    session: requests.Session,
    shared: SidecarProcess,
    trainer: TensorBridge,
) -> None:
    (method, path), schema = operation, described(shared)
    # Half of the time it is about an update that is on its way.
    active, manifest = (trainer.publish(weights(n), weight_version=n) for n in (1, 2))
    with shared.client() as engine:
        engine.update_weights(active)
        engine.import_weights(manifest)
        before = engine.status().active_weight_version

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode), is_known=st.booleans())
    def fuzz(case: Any, is_known: bool) -> None:
        if is_known and case.path_parameters:
            case.path_parameters["update_id"] = manifest.update_id
        response = case.call(base_url=shared.url, session=session, timeout=30)
        case.validate_response(response, checks=CHECKS)

    fuzz()
    with shared.client() as engine:
        # Nothing was prepared unless it was asked for, so nothing can have been committed.
        assert engine.status().active_weight_version == before
        assert shared.is_alive
