"""What an engine is made of, by its options and its device."""

from pathlib import Path

import pytest
from checkpoints import random_llm


@pytest.mark.parametrize(("option", "budget"), [(None, 2048), (8192, 8192)])
def test_token_budget_of_a_cpu(path: Path, option: int | None, budget: int) -> None:
    llm = random_llm(path, max_num_batched_tokens=option)
    assert llm.engine.scheduler.token_budget == budget
