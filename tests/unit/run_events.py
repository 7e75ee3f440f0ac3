"""Events of jobs that never ran, with times that can be added up by hand."""

from torchtitan_rl_ft.observability.events import Event, Kind

START_S = 1000.0


class Log:
    """Writes what the roles of a job write. `now_s` is the clock."""

    def __init__(self, *, groups=1, engines=1, ranks=None):
        self.now_s, self.step, self.version = START_S, 0, 0
        self.events = []
        self.groups = [f"trainer-{i}" for i in range(groups)]
        self.engines = [f"engine-{i}" for i in range(engines)]
        self._pids = {}
        self._ranks = ranks
        self._group, self._sealed, self._batch = 0, 0, []

    def emit(self, name, kind, *, role=None, pid=None, phase=None, cause=None, **fields):
        step, version = fields.pop("step", None), fields.pop("version", None)
        self.events.append(
            Event(
                wall_s=1.7e9 + self.now_s,
                mono_s=self.now_s,
                run="run",
                role=role or name.split("-")[0],
                name=name,
                attempt=1,
                pid=pid or self._pids.get(name, 1),
                kind=kind,
                phase=phase,
                cause=cause,
                step=step,
                version=version,
                data=fields,
            )
        )

    def spawn(self, name, by="supervisor"):
        self._pids[name] = 1 + max(self._pids.values(), default=100)
        self.emit(by, Kind.SPAWN, subject=name, pid=None, attempt=1)

    def engine(self, name, new, **fields):
        self.emit("serving", Kind.TRANSITION, subject=name, new=new, **fields)

    def phase(self, name, phase):
        self.emit(name, Kind.PHASE, phase=phase, step=self.step + 1)

    def start(self, startup_s=10.0, phase="start"):
        ranks = {} if self._ranks is None else {"ranks": self._ranks}
        self.emit("supervisor", Kind.RUN, phase=phase, roles=["rollout", *self.groups], **ranks)
        for name in ["rollout", "serving", *self.groups]:
            self.spawn(name)
        for name in self.engines:
            self.spawn(name, by="serving")
        self.now_s += startup_s
        for name in self.engines:
            self.engine(name, "stale")
            self.engine(name, "installing")
            self.engine(name, "serving", version=self.version)
        for name in self.groups:
            self.phase(name, "attach")
            self.phase(name, "waiting_for_batch")

    def issue(self, groups=1):
        first = self._group + 1
        self._group += groups
        self.emit("rollout", Kind.ISSUE, groups=groups, first=first, last=self._group)
        return list(range(first, self._group + 1))

    def accept(self, groups, **fields):
        for group in groups:
            self.emit("rollout", Kind.ACCEPT, group=group, **fields)
        self._batch += groups

    def seal(self):
        self._sealed += 1
        batch, self._batch = self._batch, []
        self.emit("rollout", Kind.SEAL, step=self._sealed, batch=1, samples=4, groups=batch)

    def rollout(self, seconds, *, dropped=False):
        groups = self.issue()
        self.now_s += seconds
        if dropped:
            self.emit("rollout", Kind.DROP, cause="filter", group=groups[0])
        else:
            self.accept(groups)
            self.seal()

    def train(self, seconds, groups=None):
        """All groups together, from their quorum to the commit."""
        for name in groups or self.groups:
            self.phase(name, "quorum")
            self.emit(name, Kind.QUORUM, step=self.step + 1)
            self.phase(name, "forward_backward")
        self.now_s += seconds
        for name in groups or self.groups:
            self.phase(name, "optimizer")
            self.phase(name, "report")
        self.commit(groups)
        for name in groups or self.groups:
            self.phase(name, "waiting_for_batch")

    def commit(self, groups=None):
        self.step += 1
        shares = [[name, 1, 1] for name in groups or self.groups]
        self.emit("rollout", Kind.COMMIT, step=self.step, shares=shares)

    def supersede(self, to_step):
        self.emit("rollout", Kind.SUPERSEDE, from_step=self.step, to_step=to_step)
        self.step = to_step

    def kill_trainer(self, index, *, after_s, restart_s, reconnect_s, rolling=False):
        """In the middle of a step; its new process stands before its quorum afterwards."""
        name = self.groups[index]
        self.phase(name, "quorum")
        self.phase(name, "forward_backward")
        self.now_s += after_s
        groups = self.issue() if rolling else []
        self.emit("supervisor", Kind.EXIT, phase="fault", cause="killed by SIGKILL", subject=name)
        self.spawn(name)
        self.now_s += restart_s
        self.phase(name, "attach")
        self.now_s += reconnect_s
        if groups:
            self.accept(groups)
        self.phase(name, "waiting_for_batch")
