"""Tests with real DeepSpeed, Megatron and peft on the CPU: `make test-trainers`."""
