"""Run Slurm on this machine: a controller and two nodes, with Debian's slurmctld and slurmd."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo", "squeue", "srun")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
SlurmdTimeout=20
ReturnToService=2
KillWait=10
MailProg=/bin/true
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=64000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=64000
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def why_missing() -> str:
    """Return why Slurm cannot be run on this machine; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: install slurmctld, slurmd and slurm-client"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    return ""


@dataclass
class Slurm:
    """A controller and two nodes of four CPUs.

    Attributes:
        folder: Folder of the files of Slurm. Jobs are submitted in it.
        nodes: Node name -> its daemon process.
    """

    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of Slurm's programs and of jobs."""
        python = Path(sys.executable)
        return os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
            "ACCRETE_PYTHON": str(python),
            "ACCRETE_RAY": str(python.with_name("ray")),
        }

    def call(self, *command: str) -> str:
        """Run a program, and return its output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit a job with these arguments of `sbatch`, and return its id."""
        return self.call("sbatch", "--parsable", *words).strip()

    def states(self, job: str) -> set[str]:
        """Return the states of a job, or of all jobs of an array or heterogeneous one."""
        return set(re.findall(r"JobState=(\w+)", self.call("scontrol", "-o", "show", "job", job)))

    def wait(self, job: str, state: str, seconds: float = 400) -> None:
        """Wait until a job is in a state. Raise AssertionError if it ends in another state."""
        deadline = time.monotonic() + seconds
        while (states := self.states(job)) != {state}:
            assert time.monotonic() < deadline, (states, self.logs())
            assert not states & {"FAILED", "TIMEOUT", "CANCELLED"}, (states, self.logs())
            time.sleep(0.5)

    def wait_for_restart(self, job: str, seconds: float = 120) -> None:
        """Wait until a job was requeued. It may stay in the queue for only a second."""
        deadline = time.monotonic() + seconds
        while " Restarts=1 " not in self.call("scontrol", "-o", "show", "job", job):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the output of all jobs so far, and the output of Ray in failed jobs."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextlib.contextmanager
def slurm_up(folder: Path) -> Iterator[Slurm]:
    """Start Slurm. At the end, stop Slurm and all its jobs."""
    slurm = Slurm(folder)
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir(parents=True)
    text = CONFIG.format(host=host, ports=free_ports(3), folder=folder)
    (folder / "slurm.conf").write_text(text)
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(folder / f"{name}.out", "wb") as output:
            process = subprocess.Popen(
                command, env=slurm.environment, stdout=output, stderr=subprocess.STDOUT
            )
        processes.append(process)
        return process

    try:
        start("controller", "slurmctld", "-D")
        for name in ("node1", "node2"):
            (folder / name).mkdir()
            slurm.nodes[name] = start(name, "slurmd", "-D", "-N", name)
        deadline = time.monotonic() + 900
        while slurm.call("sinfo", "-h", "-o", "%T %D").split() != ["idle", "2"]:
            assert time.monotonic() < deadline, [
                (folder / name).read_text() for name in ("controller.out", "node1.out", "node2.out")
            ]
            time.sleep(0.5)
        yield slurm
    finally:
        with contextlib.suppress(AssertionError):
            slurm.call("scancel", "--user=root")
            deadline = time.monotonic() + 900
            while slurm.call("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.5)
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
