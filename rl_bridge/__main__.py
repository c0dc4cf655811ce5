"""``python -m rl_bridge``: the same program as ``rl-bridge``."""

from rl_bridge.cli import main

if __name__ == "__main__":
    main()
