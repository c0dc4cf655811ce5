"""Engines for side-cars of these tests: `rl-bridge sidecar tests.sglang.sidecars:NAME`."""

from rl_bridge.remote import TwoPhaseExecutor
from rl_bridge.sglang import SGLangInstallAdapter, connect
from tests.engines.sidecars import URL, dying_executor
from tests.sglang.served import KEY


def dying() -> TwoPhaseExecutor:
    """An SGLang server's."""
    engine = connect(URL.read_text(), api_key=KEY)
    return dying_executor(SGLangInstallAdapter(engine, take_over=True))
