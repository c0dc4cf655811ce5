"""The one thing that pyproject.toml cannot say: an optional C extension.

Without a compiler the extension is skipped (``optional=True``), the pure-Python path is used and
gives the same bytes; only speed differs.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "rl_bridge.memory._native",
            ["rl_bridge/memory/_native.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ],
)
