"""The kernel's own count of processes that it killed for want of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchscape.measure.oom_kills import oom_kills

FAULTS = str(Path(__file__).parents[1] / "faults")

V2_MOUNT = "30 23 0:26 {source} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {source} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
OTHERS = (
    "23 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def machine(root: Path, member: str, mounts: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(member)
    (root / "proc/self/mountinfo").write_text(OTHERS + mounts)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


EVENTS = "low 0\nhigh 0\nmax 12\noom 4\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("member", "mounts", "files", "expected"),
    [
        # Version 2, of a user's session.
        (
            "0::/user.slice/app.scope\n",
            V2_MOUNT.format(source="/"),
            {"user.slice/app.scope/memory.events": EVENTS.format(3)},
            3,
        ),
        # A container whose cgroup is the root of what it sees, or whose mount begins at it.
        ("0::/\n", V2_MOUNT.format(source="/"), {"memory.events": EVENTS.format(2)}, 2),
        (
            "0::/docker/abc\n",
            V2_MOUNT.format(source="/docker/abc"),
            {"memory.events": EVENTS.format(5)},
            5,
        ),
        # Its own name is not what is mounted.
        (
            "0::/../elsewhere\n",
            V2_MOUNT.format(source="/"),
            {"memory.events": EVENTS.format(7)},
            7,
        ),
        # Version 1, and both at once: the memory controller is where the count is.
        (
            "5:cpu,cpuacct:/a\n4:memory:/jobs/1\n0::/\n",
            V1_MOUNT.format(source="/"),
            {"memory/jobs/1/memory.oom_control": CONTROL.format(1)},
            1,
        ),
        # The machine's own cgroup of version 2 has no events; kernels before 4.13 do not count.
        ("0::/\n", V2_MOUNT.format(source="/"), {"cgroup.procs": "1\n"}, None),
        (
            "4:memory:/\n",
            V1_MOUNT.format(source="/"),
            {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"},
            None,
        ),
        ("", "", {}, None),
    ],
)
def test_every_layout_of_cgroups(tmp_path, member, mounts, files, expected):
    assert oom_kills(machine(tmp_path, member, mounts, files)) == expected


def test_without_cgroups_there_is_no_word(tmp_path):
    assert oom_kills(tmp_path) is None


SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from memory_cgroup import join
from batchscape.measure.oom_kills import oom_kills
join(sys.argv[2])
counts = [oom_kills()]
for needs_mib in (1, 400):
    pid = os.fork()
    if pid == 0:
        open("/proc/self/oom_score_adj", "w").write("1000")
        held = bytearray(os.urandom(1)) * (needs_mib << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL
    counts.append(oom_kills())
print(json.dumps(counts))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_the_kernel_counts_its_kills_and_no_others():
    """A child that kills itself, and one that the kernel kills: in a cgroup of 200 MiB."""
    sys.path.insert(0, FAULTS)
    from memory_cgroup import memory_cgroup

    sys.path.remove(FAULTS)
    with memory_cgroup(200 << 20) as procs:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, FAULTS, str(procs)],
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    before, after_kill, after_oom = json.loads(done.stdout)
    assert before is not None
    assert (after_kill, after_oom) == (before, before + 1)
