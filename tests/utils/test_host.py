"""Memory and cores of this machine, of a container, and of systems that are not Linux."""

import os
from pathlib import Path

import psutil
import pytest

from nanovllm.utils import host

MIB = 2**20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group without files, as on a system without containers."""
    monkeypatch.setattr(host, "CONTROL_GROUP", tmp_path)
    return tmp_path


def test_memory_without_a_container(group: Path) -> None:
    free = host.available_host_memory()
    assert free == pytest.approx(psutil.virtual_memory().available, abs=1024 * MIB)


@pytest.mark.parametrize(("limit", "free"), [("max", 64), (str(50 * MIB), 50 - 30 + 10), ("0", 0)])
def test_memory_of_a_container(
    limit: str, free: int, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it uses counts, but not the page cache that Linux can reclaim."""

    class Memory:
        available = 64 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{30 * MIB}\n")
    (group / "memory.stat").write_text(f"anon {20 * MIB}\ninactive_file {10 * MIB}\n")
    assert host.available_host_memory() == free * MIB


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3}, raising=False)
    assert host.available_cores() == [3, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert host.available_cores() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("?", 8)]
)
def test_quota_of_a_container(text: str, cores: int, group: Path) -> None:
    (group / "cpu.max").write_text(text)
    assert host.quota(8) == cores
    (group / "cpu.max").unlink()
    assert host.quota(8) == 8
