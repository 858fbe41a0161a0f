"""The machine a figure was taken on: what it is and what runs on it, never whose it is."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "labkit")
PROJECT = Path(__file__).resolve().parent.parent


def default_device() -> str:
    """The type of the device that is measured unless another one is asked for."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def machine_facts(device_type: str | None = None) -> dict:
    """What a figure depends on besides recipe and data, as JSON values.

    The host name is left out: records are published.

    Args:
        device_type: ``cpu``, ``cuda`` or ``mps``; None for the default of this machine.

    Returns:
        ``name`` (device and cores, for people), ``cpu``, ``cores``, ``threads`` and how they
        wait, ``memory_bytes``, ``device``, ``device_name``, ``cpu_capability``, ``os``,
        ``python``, ``versions`` by package, and ``commit`` (None outside a git checkout).
    """
    import torch

    device = device_type or default_device()
    cpu, cores = _cpu_name(), _usable_cores()
    device_name = torch.cuda.get_device_name() if device == "cuda" else cpu
    parts = [device_name] if device_name == cpu else [device_name, cpu]
    return {
        "name": ", ".join([*parts, f"{cores} core{'s' if cores > 1 else ''}"]),
        "cpu": cpu,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
        "memory_bytes": memory_bytes(),
        "device": device,
        "device_name": device_name,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": installed_versions(),
        "commit": _commit(),
    }


def installed_versions() -> dict[str, str | None]:
    """The versions that a figure depends on."""
    return {package: installed_version(package) for package in PACKAGES}


@cache
def installed_version(package: str) -> str | None:
    """The version of an installed package, None if there is none; looked up once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def memory_bytes() -> int:
    """Bytes of memory that this machine, or the container it is, may use."""
    import psutil

    limit = _read("/sys/fs/cgroup/memory.max").strip()
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def free_memory_bytes() -> int:
    """Bytes of memory that a process could still get, in a container below its limit."""
    import psutil

    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    below_limit = [int(limit) - int(used)] if limit.isdigit() and used.isdigit() else []
    return min([psutil.virtual_memory().available, *below_limit])


def _cpu_name() -> str:
    """The model of the processor in its maker's words, else its architecture."""
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    elif platform.system() == "Linux":
        lines = _read("/proc/cpuinfo").splitlines()
        name = next(
            (line.split(":", 1)[1] for line in lines if line.startswith("model name")), ""
        )
    else:
        name = platform.processor()
    return " ".join((name or "").split()) or platform.machine()


def _usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """The commit that this code is, ``+changes`` added when files differ from it."""
    git = ("git", "-C", str(PROJECT))
    if Path(_output(*git, "rev-parse", "--show-toplevel") or ".").resolve() != PROJECT:
        return None
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    changes = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit or None


def _output(*command: str) -> str:
    """What a command prints, nothing if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _read(path: str) -> str:
    """The text of a system file, nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
