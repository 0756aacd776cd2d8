"""A real Slurm of several nodes on one machine, for tests: loopback only, no systemd, no cgroups.

It runs as whoever calls, root or not, from Debian's packages (`PACKAGES`). Every node is a `slurmd`
of its own with fake GPUs, a temporary folder of its own, and a name that is an address of the
loopback, so that ranks find each other by `SLURM_JOB_NODELIST` as on a real cluster. There is no
accounting, as on many small clusters.

Its daemons are children of the process that makes it, and end with it, however that ends.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

__all__ = ["PACKAGES", "Cluster", "missing_programs"]

PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
"""What Debian calls the packages that this needs."""

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "setpriv")
_START_S, _STOP_S = 60.0, 15.0


def missing_programs() -> list[str]:
    """Return which programs of a cluster this machine lacks."""
    with_daemons = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [name for name in _PROGRAMS if shutil.which(name, path=with_daemons) is None]


class Cluster:
    """A cluster with the partitions `main` and, ended by it where nodes are short, `low`.

    Parameters
    ----------
    nodes : int
    gpus, cpus, memory_mib : int
        Of each node: as declared, whatever this machine has.
    settings : iterable of str
        Lines for `slurm.conf`, in place of those here that set the same.
    """

    def __init__(
        self,
        nodes: int = 3,
        gpus: int = 4,
        cpus: int = 16,
        memory_mib: int = 16000,
        settings: Iterable[str] = (),
    ) -> None:
        self.nodes = tuple(f"127.0.0.{number}" for number in range(1, nodes + 1))
        # Short, whatever TMPDIR is: paths of sockets have 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(self.root / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._configure(gpus, cpus, memory_mib, settings)
            self._start_all()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run a command as a user of the cluster; return what it printed."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a script of bash, its output kept only if an option says where; return its id."""
        output = (
            ()
            if any(option.startswith("--output") for option in options)
            else ("--output=/dev/null",)
        )
        return self.run("sbatch", "--parsable", *output, *options, f"--wrap={script}").strip()

    def state(self, job: str) -> str:
        """Return the state of a job, as the controller calls it."""
        return self.run(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"
        ).strip()

    def wait_for(self, job: str, *states: str, timeout_s: float = 500.0) -> str:
        """Wait until a job is in one of some states; return it."""
        found = ""

        def is_there() -> bool:
            nonlocal found
            found = self.state(job)
            return found in states

        _wait_until(is_there, timeout_s, lambda: f"job {job} is {found}, not {states}")
        return found

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until none is left on a node that lives."""
        self.run("scancel", f"--user={_user()}")
        with suppress(AssertionError):  # jobs of nodes that are gone complete for ever
            _wait_until(lambda: not self.run("squeue", "--noheader").strip(), 20.0, str)

    def kill_node(self, node: str) -> None:
        """End a node as a cut of its power does: its daemon and all that runs on it, at once.

        The controller is not told: it finds out within `SlurmdTimeout`.
        """
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self._kill_jobs(node)

    def lose(self, node: str) -> None:
        """Have the controller know that a node is gone."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def start_node(self, node: str) -> None:
        """Start a node, also one that was killed, and wait until it takes jobs."""
        spool = self.root / f"spool.{node}"
        shutil.rmtree(spool, ignore_errors=True)  # with the jobs of before
        spool.mkdir()
        self._start_daemon(node, "slurmd", "-D", "-N", node)
        self.wait_until_idle(node)

    def restore(self) -> None:
        """Have no jobs, and all nodes there."""
        self.cancel_all()
        for node in self.nodes:
            if node not in self._daemons:
                self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self, *nodes: str) -> None:
        """Wait until nodes, or all, are there with nothing on them."""
        wanted = nodes or self.nodes

        def are_idle() -> bool:
            for node in wanted:
                command = ("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")
                states = set(self.run(*command).split())
                if states and all(state.startswith("down") for state in states):
                    with suppress(AssertionError):  # not registered yet
                        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
                if states != {"idle"}:
                    return False
            return True

        _wait_until(are_idle, _START_S, lambda: f"{self.run('sinfo', '-N', '-l')}{self._logs()}")

    def close(self) -> None:
        """End everything, and remove it."""
        for name in reversed(list(self._daemons)):
            daemon = self._daemons.pop(name)
            daemon.terminate()
            try:
                daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in self.nodes:
            self._kill_jobs(node)
        shutil.rmtree(self.root, ignore_errors=True)

    def _configure(self, gpus: int, cpus: int, memory_mib: int, settings: Iterable[str]) -> None:
        root, user, host = self.root, _user(), socket.gethostname().partition(".")[0]
        for name in ("state", "log", "gpu"):
            (root / name).mkdir()
        for number in range(gpus):
            # A GPU's file must be a character device.
            (root / "gpu" / f"fake{number}").symlink_to("/dev/null")
        for node in self.nodes:
            (root / f"scratch.{node}").mkdir()
        key = root / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        prolog = root / "task_prolog"
        prolog.write_text(f'#!/bin/sh\necho "export TMPDIR={root}/scratch.$SLURMD_NODENAME"\n')
        prolog.chmod(0o755)
        controller_port, *ports = _free_ports(1 + len(self.nodes))
        chosen = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": controller_port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            # A requeued job starts after the credential of its last start has expired.
            "AuthInfo": f"socket={root}/munge.socket,cred_expire=5",
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "SlurmctldPidFile": root / "slurmctld.pid",
            "SlurmdPidFile": root / "slurmd.%n.pid",
            "StateSaveLocation": root / "state",
            "SlurmdSpoolDir": root / "spool.%n",
            "SlurmctldLogFile": root / "log" / "slurmctld.log",
            "SlurmdLogFile": root / "log" / "slurmd.%n.log",
            "TaskProlog": prolog,
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "DefMemPerCPU": 100,
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,"
            "sched_min_interval=10000,bf_interval=2",
            "SlurmdParameters": "config_overrides",
            "SlurmctldParameters": "preempt_send_user_signal",
            "GresTypes": "gpu",
            "ReturnToService": 2,
            "MailProg": "/bin/true",
            "JobRequeue": 1,
            "KillWait": 5,
            "SlurmdTimeout": 30,
            # Names of jobs are of this cluster alone, and of this start of it.
            "FirstJobId": int(time.time()) % 60_000_000 + 1,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
        }
        for line in settings:
            name, _, value = line.partition("=")
            chosen[name] = value
        lines = [f"{name}={value}" for name, value in chosen.items()]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
            f"RealMemory={memory_mib} Gres=gpu:{gpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        lines += [
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 "
            "PreemptMode=OFF",
            "PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE "
            "GraceTime=5",
        ]
        (root / "slurm.conf").write_text("\n".join(lines) + "\n")
        gres = [
            f"NodeName={node} Name=gpu File={root}/gpu/fake[0-{gpus - 1}]"
            for node in self.nodes
            if gpus
        ]
        (root / "gres.conf").write_text("\n".join(gres) + "\n")
        # Loaded, and never used: release 22.05 knows no `disabled`.
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_all(self) -> None:
        root = self.root
        files = [
            f"--{kind}={root}/munge.{kind.partition('-')[0]}"
            for kind in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._start_daemon(
            "munged", "munged", "--foreground", "--force", f"--key-file={root}/munge.key", *files
        )
        _wait_until((root / "munge.socket").exists, _START_S, self._logs)
        self._start_daemon("slurmctld", "slurmctld", "-D")
        _wait_until(self._is_controlled, _START_S, self._logs)
        for node in self.nodes:
            spool = root / f"spool.{node}"
            spool.mkdir()
            self._start_daemon(node, "slurmd", "-D", "-N", node)
        self.wait_until_idle()

    def _is_controlled(self) -> bool:
        with suppress(AssertionError):
            return "is UP" in self.run("scontrol", "ping")
        return False

    def _start_daemon(self, name: str, *command: str) -> None:
        # Signals that are ignored here, as in the background of a script, would be in every job.
        usual = ("env", "--default-signal", "setpriv", "--pdeathsig", "TERM")
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*usual, *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.root,
            )

    def _kill_jobs(self, node: str) -> None:
        """Kill the jobs of a node with their daemons, which would tell the controller, first."""
        log = str(self.root / "log" / f"slurmd.{node}.log")
        own = {"SLURM_CONF": self.environment["SLURM_CONF"], "SLURMD_NODENAME": node}
        daemons, others = [], []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # Their environment cannot be seen; they write to the log of their node.
                if process.name() == "slurmstepd":
                    if any(file.path == log for file in process.open_files()):
                        daemons.append(process)
                        others += process.children(recursive=True)
                elif own.items() <= process.environ().items():
                    others.append(process)
        for process in [*daemons, *others]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([*daemons, *others], timeout=_STOP_S)

    def _logs(self) -> str:
        logs = sorted((self.root / "log").iterdir())
        return "".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until(is_so: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)
