"""Tests of the drivers and of what owns their memory."""
