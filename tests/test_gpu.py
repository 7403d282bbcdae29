"""What needs a CUDA device: `pytest -m gpu`. Skipped without one."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.demo import data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cuda_equals_cpu(embedded: LLM, asynchronous: bool) -> None:
    """In float32 the answers of the embedded model are the CPU's, token by token."""
    torch.backends.cuda.matmul.allow_tf32 = False
    chats = [
        [{"role": "user", "content": s.question}]
        for task in data.ALL_TASKS
        for s in data.graded_samples(task, 6)[:6]
    ]
    llm = LLM(dtype="float32", device="cuda", async_scheduling=asynchronous)
    want = [o["token_ids"] for o in embedded.chat(chats, use_tqdm=False)]
    assert [o["token_ids"] for o in llm.chat(chats, use_tqdm=False)] == want
