"""The tests. A package, so that spawned children import test modules under one name."""
