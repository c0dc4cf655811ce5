"""The trainer side."""
