"""A second host for `mpirun`: a network namespace with a name, an address and a link of its own."""

import os
import pathlib
import socket
import subprocess

from harness.processes import processes

# Of the network for benchmarks (RFC 2544), which nobody routes.
NETWORK = "198.18.77.0/30"
FIRST, SECOND = "198.18.77.1", "198.18.77.2"
NAME = "second"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class SecondHost:
    """As a context manager it exists during the block. Raises OSError where the system permits no such network."""

    def __init__(self, folder):
        self.namespace = f"inflight{os.getpid()}"
        # The names of interfaces have at most 15 characters.
        self.link, self.other_end = (f"ifl{os.getpid()}{end}" for end in "ab")
        # What mpirun calls instead of ssh: with the host and a command.
        self.agent = pathlib.Path(folder) / "agent"
        self.agent.write_text(
            "#!/bin/sh\nshift\n"
            f'exec nsenter --net=/run/netns/{self.namespace} unshare --uts sh -c "hostname {NAME}; $*"\n'
        )
        self.agent.chmod(0o755)

    def __enter__(self):
        try:
            run("ip", "netns", "add", self.namespace)
            run("ip", "link", "add", "name", self.link, "type", "veth", "peer", "name", self.other_end)
            run("ip", "link", "set", self.other_end, "netns", self.namespace)
            run("ip", "address", "add", f"{FIRST}/30", "dev", self.link)
            run("ip", "link", "set", self.link, "up")
            inside = ("ip", "-netns", self.namespace)
            run(*inside, "address", "add", f"{SECOND}/30", "dev", self.other_end)
            run(*inside, "link", "set", self.other_end, "up")
            run(*inside, "link", "set", "lo", "up")
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # The link ends with the namespace, unless it was not moved there.
        for command in (["netns", "delete", self.namespace], ["link", "delete", self.link]):
            subprocess.run(["ip", *command], capture_output=True)

    def cut(self):
        """Takes the network from it."""
        run("ip", "link", "set", self.link, "down")

    def mend(self):
        """Gives the network back."""
        run("ip", "link", "set", self.link, "up")

    def processes(self, program):
        """The process ids of its processes with this program."""
        own = os.stat(f"/run/netns/{self.namespace}").st_ino
        return processes(program, lambda folder: os.stat(folder / "ns/net").st_ino == own)

    def _mpi_options(self):
        return {
            "btl": "self,tcp",
            "btl_tcp_if_include": NETWORK,
            "oob_tcp_if_include": NETWORK,
            "plm_rsh_agent": str(self.agent),
        }

    def mpirun_arguments(self):
        """Arguments of mpirun, and those of the first host's program and of the second one's."""
        options = self._mpi_options()
        all_programs = [argument for name, value in options.items() for argument in ("--mca", name, value)]
        return all_programs, ["--host", socket.gethostname()], ["--host", SECOND]

    def mpirun_environment(self):
        """Environment in which mpirun has both hosts, with a process each, as a batch system gives them to it."""
        hosts = self.agent.with_name("hosts")
        hosts.write_text(f"{socket.gethostname()} slots=1\n{SECOND} slots=1\n")
        options = {**self._mpi_options(), "orte_default_hostfile": str(hosts)}
        return {f"OMPI_MCA_{name}": value for name, value in options.items()}
