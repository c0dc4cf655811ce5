"""The one thing that pyproject.toml cannot say: an optional C extension.

Without a compiler the extension is skipped (``optional=True``), the pure-Python path is used and
gives the same bytes; only speed differs.

Each Python has a wheel of its own. One for all (``abi3``) would cost what the module is for: it
asks 40,000 tensors and their modules what they are, through the number that Python 3.11 gives each
dictionary (``ma_version_tag``), the size of a tensor object (``tp_basicsize``), and lists' items
without a call each; the stable ABI shows none of the three.
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
