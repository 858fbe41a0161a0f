"""Step times when threads that wait sleep at once, spin, or spin briefly, as labkit has it.

labkit lets them spin for some microseconds. This shows what that is worth on your machine: the
same recipe in fresh processes under each policy, in turn, alone and beside a process that keeps
one core busy. Prints one JSON line a process, then a summary.

    python bench/wait_policy.py --rounds 3
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager

MEASURE = """
import json, labkit
from labkit.measure import measure
recipe = labkit.profile_named("tiny").recipe
report = measure(recipe, labkit.read_pairs(), device="cpu", timed_steps=30)
print(json.dumps(report.step_seconds))
"""


def spin() -> None:
    """Keep a core busy for ever."""
    while True:
        pass


@contextmanager
def neighbour(wanted: bool):
    """A process that keeps a core busy while the block runs, if wanted."""
    process = multiprocessing.Process(target=spin, daemon=True)
    if wanted:
        process.start()
    yield
    if wanted:
        process.terminate()


POLICIES = {  # what is set in the environment; labkit leaves a policy that is set as it is
    "labkit": {},
    "sleep at once": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin": {"OMP_WAIT_POLICY": "ACTIVE"},
}


def step_seconds(policy: str) -> list[float]:
    """The times of 30 steps in a fresh process under a policy."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=os.environ | POLICIES[policy],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Alternate the policies for some rounds and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for busy in (False, True):
        times = {policy: [] for policy in POLICIES}
        for _ in range(rounds):
            for policy, all_seconds in times.items():
                with neighbour(busy):
                    seconds = step_seconds(policy)
                print(json.dumps({"busy": busy, "policy": policy, "seconds": seconds}))
                all_seconds.extend(seconds)
        for policy, seconds in times.items():
            print(
                f"{'one core busy' if busy else 'cores free'}, {policy}: "
                f"median {statistics.median(seconds):.4f} s, largest {max(seconds):.4f} s"
            )


if __name__ == "__main__":
    main()
