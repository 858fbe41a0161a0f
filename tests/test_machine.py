import json
import os
import platform
import subprocess
import sys

import pytest

from labkit import machine
from labkit.machine import free_memory_bytes, installed_version, machine_facts, memory_bytes


def test_facts_are_json_and_name_what_figures_depend_on():
    facts = machine_facts("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["device"] == "cpu"
    assert facts["device_name"] == facts["cpu"] != ""
    assert facts["name"].startswith(f"{facts['cpu']}, {facts['cores']} core")
    assert facts["python"] == platform.python_version()
    assert facts["versions"]["torch"]
    assert facts["memory_bytes"] > 2**28


def test_facts_do_not_tell_the_host_name(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "private-host")
    assert "private-host" not in json.dumps(machine_facts())


def test_a_container_has_the_memory_of_its_limit(monkeypatch):
    limits = {"memory.max": str(2**30), "memory.current": str(2**29)}
    monkeypatch.setattr(machine, "_read", lambda path: limits[path.rsplit("/", 1)[1]])
    assert memory_bytes() == 2**30
    assert free_memory_bytes() <= 2**29


def test_a_machine_without_limits_has_all_of_its_memory(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "max\n")
    assert memory_bytes() > 2**28
    assert 0 < free_memory_bytes() <= memory_bytes()


@pytest.mark.parametrize(
    ("system", "name"),
    [("Linux", "Abacus 3"), ("Darwin", "Abacus M1"), ("Windows", "Abacus W")],
)
def test_the_processor_is_named_on_every_system(monkeypatch, system, name):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "processor", lambda: "Abacus W")
    monkeypatch.setattr(machine, "_output", lambda *command: "Abacus M1")
    monkeypatch.setattr(machine, "_read", lambda path: "vendor: x\nmodel name\t: Abacus   3\n")
    assert machine._cpu_name() == name


def test_a_processor_without_a_name_is_its_architecture(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine, "_read", lambda path: "")
    assert machine._cpu_name() == platform.machine()


def test_the_commit_is_that_of_this_checkout_only(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    assert machine._commit() is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org")
    (tmp_path / "file").write_text("1", encoding="utf-8")
    for command in (("init", "-q"), ("add", "file"), ("commit", "-q", "-m", "first")):
        subprocess.run([*git, *command], check=True)
    clean = machine._commit()
    assert clean.isalnum()
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert machine._commit() == f"{clean}+changes"


def test_a_missing_program_is_no_error():
    assert machine._output("no-such-program-anywhere") == ""


def test_a_package_that_is_not_installed_has_no_version():
    assert installed_version("no-such-package-anywhere") is None


@pytest.mark.parametrize(
    ("given", "policy", "spins"),
    [({}, "PASSIVE", "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None)],
)
def test_threads_spin_briefly_unless_somebody_has_said_how_they_wait(given, policy, spins):
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    code = f"import json, os, labkit; print(json.dumps([os.environ.get(n) for n in {ours}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [policy, spins]
