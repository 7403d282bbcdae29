"""Memory that a step frees is used again, without system calls and new pages."""

import platform

import fresh
import pytest

CODE = """
import resource
import torch
from nanovllm.backends.cpu.heap import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for tokens in (1000, 2000, 3000):  # as the layers of a prompt do, with up to 36 MB
        x = torch.ones(tokens, 3000)
        y = torch.ones(tokens, 1000)
        del x, y
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [new_pages() for _ in range(4)]
keep_freed_memory()
after = [new_pages() for _ in range(4)]
print(before[-1], after[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="has no mallopt")
def test_freed_memory_is_kept() -> None:
    done = fresh.run(CODE)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 1_000
    assert after < 100
