"""Buckets in which tensors go by SGLang's own routes."""

from unittest import mock

import pytest
import torch

from rl_bridge.engines.sglang.loaders import _Bucket
from rl_bridge.trainers.chunks import BufferPlan


def test_a_bucket_that_found_no_memory_is_made_for_the_same_update_later() -> None:
    bucket = _Bucket()
    bucket.fill({"v": torch.zeros(3)}, "cpu")
    update = {"w": torch.arange(4.0), "x": torch.ones(2, dtype=torch.bfloat16)}
    with (
        mock.patch.object(BufferPlan, "allocate", side_effect=torch.OutOfMemoryError("planted")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        bucket.fill(update, "cpu")
    buffer, places = bucket.fill(update, "cpu")
    for name, start in places:
        found = buffer[start : start + update[name].nbytes]
        assert found.equal(update[name].view(torch.uint8))
