"""The tests that run real SGLang engines. See `make test-sglang`."""
