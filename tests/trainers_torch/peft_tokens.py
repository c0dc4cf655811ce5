"""What transformers and peft themselves answer with an adapter, without any engine."""

from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def tokens(
    base: str, adapter: str | None, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """The most likely tokens behind each prompt, in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    found = []
    for prompt in prompts:
        given = torch.tensor([list(prompt)])
        for _ in range(count):
            with torch.no_grad():
                following = model.eval()(given).logits[0, -1].argmax()
            given = torch.cat([given, following.view(1, 1)], dim=1)
        found.append(given[0, len(prompt) :].tolist())
    return found
