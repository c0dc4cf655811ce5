"""Tests of digest and pack on a device: interpreted, in torch, compiled, and on a GPU."""
