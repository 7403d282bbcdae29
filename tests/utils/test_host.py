"""Memory and cores of this machine, of a container, and of systems that are not Linux."""

import os
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from nanovllm.utils import host

MIB = 2**20


@pytest.fixture
def group(tmp_path, monkeypatch) -> Path:
    """A control group without files, as on a system without containers."""
    monkeypatch.setattr(host, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(host, "GROUPS_OF_PROCESS", tmp_path / "groups")
    return tmp_path


def test_memory_without_a_container(group: Path) -> None:
    free = host.available_host_memory()
    assert free == pytest.approx(psutil.virtual_memory().available, abs=1024 * MIB)


# The version of control groups, its directory and what /proc says, and its files.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
PLACES = [
    (V2, ".", "0::/\n"),
    (V2, "a.slice/b.scope", "0::/a.slice/b.scope\n"),
    (V2, "a.slice", "0::/a.slice/b.scope\n"),  # a limit applies to the groups below it
    (V2, ".", "0::/../other\n"),
    (V2, ".", ""),  # /proc is hidden
    (V1, "memory", "4:memory:/docker/1\n0::/\n"),  # the container's group is the root of its mount
    (V1, "memory/x/y", "5:cpu,cpuacct:/z\n4:memory:/x/y\n"),
]


@pytest.mark.parametrize(("limit", "free"), [("max", 64), (50 * MIB, 50 - 30 + 10), ("0", 0)])
@pytest.mark.parametrize(("files", "place", "groups"), PLACES)
def test_memory_of_a_container(
    files: tuple[str, ...], place: str, groups: str, limit: str, free: int, group: Path, monkeypatch
) -> None:
    """What it uses counts, but not the page cache that Linux can reclaim."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(available=64 * MIB))
    (group / "groups").write_text(groups)
    (directory := group / place).mkdir(parents=True, exist_ok=True)
    (directory / files[0]).write_text(f"{limit}\n")
    (directory / files[1]).write_text(f"{30 * MIB}\n")
    (directory / "memory.stat").write_text(f"anon {20 * MIB}\n{files[2]} {10 * MIB}\n")
    assert host.available_host_memory() == free * MIB
    (directory / "memory.stat").write_text("anon 0\n")
    assert host.available_host_memory() == max(0, free - 10 * (limit != "max")) * MIB
    (directory / "memory.stat").unlink()
    assert host.available_host_memory() == max(0, free - 10 * (limit != "max")) * MIB


def test_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3}, raising=False)
    assert host.available_cores() == [3, 5]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert host.available_cores() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("?", 8)]
)
@pytest.mark.parametrize("place", [".", "a.slice", "a.slice/b.scope"])
def test_quota_of_a_container(place: str, text: str, cores: int, group: Path) -> None:
    (group / "groups").write_text("0::/a.slice/b.scope\n")
    (group / place).mkdir(parents=True, exist_ok=True)
    (group / place / "cpu.max").write_text(text)
    assert host.quota(8) == cores
    (group / place / "cpu.max").unlink()
    assert host.quota(8) == 8


@pytest.mark.parametrize("place", ["cpu", "cpu/x", "cpu,cpuacct/x"])
@pytest.mark.parametrize(("text", "cores"), [("-1", 8), ("150000", 2), ("1000", 1)])
def test_quota_of_version_1(place: str, text: str, cores: int, group: Path) -> None:
    (group / "groups").write_text("3:cpuset:/x\n2:cpu,cpuacct:/x\n0::/\n")
    (group / place).mkdir(parents=True)
    (group / place / "cpu.cfs_quota_us").write_text(text)
    (group / place / "cpu.cfs_period_us").write_text("100000\n")
    assert host.quota(8) == cores


@pytest.mark.parametrize(
    ("machine", "flags", "has_bf16"),
    [
        ("x86_64", "flags : fpu avx512f avx512_bf16", True),
        ("x86_64", "flags : fpu amx_bf16", True),
        ("x86_64", "flags : fpu avx512f", False),
        ("aarch64", "Features : fp asimddp i8mm bf16", False),  # Graviton 3
        ("arm64", None, False),  # a Mac, which has no such file
    ],
)
def test_bfloat16_is_not_fast_on_arm(
    machine: str, flags: str | None, has_bf16: bool, monkeypatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    read = Mock(return_value=flags) if flags else Mock(side_effect=FileNotFoundError)
    monkeypatch.setattr(Path, "read_text", read)
    assert host.cpu_has_fast_bf16() is has_bf16
