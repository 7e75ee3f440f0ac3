"""A real Slurm of one node: munged, slurmctld and slurmd as processes of a test, in its folder."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torchtitan_rl_ft.host.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
PACKAGES = "slurmctld slurmd slurm-client munge"
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={path}/munge.socket
CredType=cred/munge
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=30
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(SBIN))


def missing() -> list[str]:
    return [name for name in PROGRAMS if program(name) is None]


class SlurmCluster:
    """Use as a context manager: no daemon and no job is left at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {**os.environ, "SLURM_CONF": str(path / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        for name in ("state", "spool"):
            (self.path / name).mkdir(parents=True)
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        text = CONFIG.format(
            host=host,
            user=user,
            path=self.path,
            cpus=os.cpu_count(),
            controller_port=free_port(),
            node_port=free_port(),
        )
        (self.path / "slurm.conf").write_text(text)
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D", "-N", host)
            self.wait_for(lambda: "idle" in self.command("sinfo", "-h", "-o", "%T"), "the node")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == 3:
            self.command("scancel", "--full", "--user", str(os.getuid()), check=False)
            self.command("scancel", "--signal=KILL", "--user", str(os.getuid()), check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_munge(self) -> None:
        key = self.path / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key}
        files |= {f"{n}-file": self.path / f"munge.{n}" for n in ("pid", "log", "seed")}
        flags = [f"--{name}={path}" for name, path in files.items()]
        # --force: the folder of a test is not one of root's.
        self._start("munged", "-F", "--force", f"--socket={self.path}/munge.socket", *flags)
        self.wait_for((self.path / "munge.socket").exists, "munged")

    def _start(self, name: str, *flags: str) -> None:
        found = program(name)
        assert found is not None
        with open(self.path / f"{name}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [found, *flags], env=self.env, stdout=out, stderr=subprocess.STDOUT
                )
            )

    def command(self, *words: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        done = subprocess.run(
            words, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: Path, *arguments: str, flags: tuple[str, ...] = ()) -> str:
        """The id of the job."""
        return self.command("sbatch", "--parsable", *flags, str(script), *arguments).strip()

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` tells."""
        text = self.command("scontrol", "show", "job", job, "--oneliner")
        return dict(part.partition("=")[::2] for part in text.split() if "=" in part)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        found = [*self.path.glob("*.log"), *self.path.glob("*.out"), *self.path.glob("munge.log")]
        return "\n".join(
            f"--- {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-12:])
            for f in sorted(found)
        )
