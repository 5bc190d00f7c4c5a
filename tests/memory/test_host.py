"""What there is of host memory, in containers too; the files are those of Linux, written here."""

from pathlib import Path

import pytest
import torch

from lightning_compress.errors import CompressionError
from lightning_compress.memory.host import available_bytes, free_on, memory_bytes, total_bytes
from lightning_compress.memory.placement import MemoryConfig, memory_config

GIB = 1 << 30
CPU = torch.device("cpu")


def machine(root: Path, files: dict[str, str]) -> Path:
    """64 GiB, of which 48 are free."""
    meminfo = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cached - cached // 4}\nactive_file {cached // 4}\n"
    return {
        f"sys/fs/cgroup/{folder}memory.max": limit,
        f"sys/fs/cgroup/{folder}memory.current": str(used),
        f"sys/fs/cgroup/{folder}memory.stat": stat,
    }


def test_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "0::/user.slice\n", **group("user.slice/", "max", 7 * GIB)})
    assert (available_bytes(root), total_bytes(root)) == (48 * GIB, 64 * GIB)
    assert available_bytes(machine(tmp_path / "bare", {})) == 48 * GIB


def test_the_tightest_group_above_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job_7/step_0\n",
        **group("job_7/", str(16 * GIB), 13 * GIB, cached=4 * GIB),
        **group("job_7/step_0/", "max", 12 * GIB),
        **group("job_8/", str(GIB), GIB),
    }
    root = machine(tmp_path, files)
    assert (available_bytes(root), total_bytes(root)) == (7 * GIB, 16 * GIB)


def test_in_a_container_its_own_group_is_the_top(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/kubepods/of-the-host\n", **group("", str(8 * GIB), 9 * GIB)}
    root = machine(tmp_path, files)
    assert (available_bytes(root), total_bytes(root)) == (0, 8 * GIB)


def test_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/slurm/job_7"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n",
        f"{folder}/memory.limit_in_bytes": str(32 * GIB),
        f"{folder}/memory.usage_in_bytes": str(20 * GIB),
        f"{folder}/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\ntotal_active_file 0\n",
    }
    root = machine(tmp_path, files)
    assert (available_bytes(root), total_bytes(root)) == (14 * GIB, 32 * GIB)


def test_a_budget_as_a_part_of_what_there_is() -> None:
    config = memory_config({"host_budget": "50%", "device_budget": " 12.5 % ", "activation_budget": "1GiB"})
    assert config.num_bytes("host_budget", CPU) == total_bytes() // 2
    assert config.num_bytes("device_budget", CPU) == int(memory_bytes(CPU) * 0.125)
    assert config.num_bytes("activation_budget", CPU) == GIB


@pytest.mark.parametrize("wrong", ["101%", "%", "-5%", "5 %%"])
def test_wrong_parts(wrong: str) -> None:
    with pytest.raises(ValueError, match=r'host_budget: .* is no size; .*, or up to 100%\. Or "foreseen" or "least"\.'):
        MemoryConfig(host_budget=wrong)


def test_what_pytorch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a training it is most of the device."""
    for name, found in (
        ("mem_get_info", (3 * GIB, 80 * GIB)),
        ("memory_reserved", 70 * GIB),
        ("memory_allocated", GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert free_on(torch.device("cuda", 0)) == 72 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_part_of_a_gpu_that_is_not_here() -> None:
    assert MemoryConfig(host_budget="50%").num_bytes("host_budget", torch.device("cuda")) == total_bytes() // 2
    assert MemoryConfig(device_budget="8GiB").num_bytes("device_budget", torch.device("cuda")) == 8 * GIB
    with pytest.raises(CompressionError, match=r"device_budget: .* there is none here; give bytes"):
        MemoryConfig(device_budget="80%").num_bytes("device_budget", torch.device("cuda"))
