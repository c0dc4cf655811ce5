"""``rl_bridge.compat``: the names that users of other projects know, over this library.

One module for each: it translates, and the work is done elsewhere. Import it by its name, such as
``rl_bridge.compat.skyrl``.
"""

__all__: list[str] = []
