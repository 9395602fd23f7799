"""What a sandbox keeps in on this machine: tried once, by running programs, and said plainly."""

from dataclasses import dataclass

GUARANTEES = {
    "files": "sees none of this machine's files but the interpreter, and can write none",
    "network": "reaches no network, not even this machine",
    "processes": "sees no other process, and leaves none behind",
    "privileges": "has no privileges and can gain none",
    "limits": "is ended when it exceeds time, memory, output or number of processes",
}


@dataclass(frozen=True, slots=True)
class Strength:
    """How untrusted programs are held on this machine.

    Attributes:
        tier: ``isolated`` (namespaces, a private root) or ``limits`` (a process with limits: a
            program can read and write what its user can, and use the network).
        guarantees: what holds of a program, among :data:`GUARANTEES`.
        reason: for ``limits``, why this machine does not isolate; empty otherwise.
    """

    tier: str
    guarantees: tuple[str, ...]
    reason: str = ""

    @property
    def is_isolated(self) -> bool:
        return self.tier == "isolated"

    def summary(self) -> str:
        """One line for people."""
        missing = [name for name in GUARANTEES if name not in self.guarantees]
        line = f"sandbox: {self.tier}; holds: {', '.join(self.guarantees)}"
        if missing:
            line += f"; does NOT hold: {', '.join(missing)} ({self.reason})"
        return line


def advice(reason: str) -> str:
    """What to do about a machine that refuses namespaces."""
    remedies = [
        "allow unprivileged user namespaces (kernel.apparmor_restrict_unprivileged_userns=0, "
        + "user.max_user_namespaces above 0)",
        "in a container, run it with --privileged or a seccomp profile that allows unshare and mount",
        "or set sandbox.allow_weaker where the programs may do all that your user may",
    ]
    return (
        f"expected namespaces to run untrusted programs in, found: {reason}; {'; '.join(remedies)}"
    )


PROBE = """
import json, os, socket
found = {}
def refuses(action):
    try:
        action()
    except OSError:
        return True
    return False
def write(path):
    with open(path, "w") as stream:
        stream.write("x")
found["files"] = (
    not os.path.exists(%(host_file)r)
    and all(refuses(lambda: write(path)) for path in ("/x", "/usr/x", %(host_folder)r + "/x"))
)
def connect():
    with socket.create_connection(("127.0.0.1", %(port)d), timeout=2):
        pass
found["network"] = refuses(connect)
found["processes"] = not refuses(lambda: os.listdir("/proc")) and not any(
    name.isdecimal() and int(name) not in (1, os.getpid()) for name in os.listdir("/proc")
)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["privileges"] = (
    os.getuid() != 0
    and int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
    and status["NoNewPrivs"].strip() == "1"
)
print(json.dumps(found))
"""
"""A program that tries to get out, and says what it did not manage."""
