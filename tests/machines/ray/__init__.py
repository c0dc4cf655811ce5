"""Tests with real Ray: one cluster for each module."""
