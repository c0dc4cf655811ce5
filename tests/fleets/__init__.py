"""Tests of update groups: coverage, group manifests, resharding."""
