"""What transports over sockets share: greetings, framed messages, and slots on either side."""

__all__: list[str] = []
