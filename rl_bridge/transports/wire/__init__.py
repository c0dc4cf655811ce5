"""The parts that transports over sockets share: greetings, framed messages, slots on both sides."""

__all__: list[str] = []
