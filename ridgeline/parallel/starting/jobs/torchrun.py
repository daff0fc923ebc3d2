"""A run as a script that is started on every node by hand, or by whatever reaches them. A hostfile
names the nodes, the first of them being where ranks meet:

    # comments and empty lines are left out
    node-a
    node-b slots=8

    torchrun_job(job, read_hostfile(path, nodes=2, devices=8))
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.parallel.starting.jobs.job import Job, JobFile, preamble, torchrun_line

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:_-]*[A-Za-z0-9])?")


def torchrun_job(job: Job, hosts: Sequence[str] = ()) -> JobFile:
    """`hosts`: the nodes by name. Without them the script is told where the first one is."""
    path = job.folder / "job.sh"
    script = shlex.quote(str(path))
    lines = ["#!/bin/bash", f"# A training run of Ridgeline on {job.title}."]
    if job.nodes == 1:
        arguments, where = [], ["--standalone"]
        commands = [f"bash {script}"]
    else:
        lines.append("# To be started on every node; the run's folder must be one that all see.")
        first = shlex.quote(hosts[0]) if hosts else '"$2"'
        arguments = [": ${1:?give the number of this node, from 0}"]
        if not hosts:
            arguments.append(": ${2:?and the address of node 0}")
        where = ['--node-rank="$1"', f"--master-addr={first}", f"--master-port={job.port}"]
        commands = [
            f"{host}: bash {script} {node}"
            if hosts
            else f"node {node}: bash {script} {node} ADDRESS_OF_NODE_0"
            for node, host in enumerate(hosts or [""] * job.nodes)
        ]
    lines += ["set -eu", *arguments, preamble(job), f"exec {torchrun_line(job, where)}"]
    return JobFile(path, "\n".join(lines) + "\n", tuple(commands))


def read_hostfile(path: Path, nodes: int, devices: int) -> list[str]:
    """The names in it, checked against what was ordered."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read --hostfile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path} is not text; give a machine's name a line") from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"--hostfile {path} line {number}", devices)
        if host in hosts:
            raise UsageError(
                f"--hostfile {path} line {number} has {host} a second time; name each machine "
                "once, and give --devices for the ranks on each"
            )
        hosts.append(host)
    if len(hosts) != nodes:
        raise UsageError(
            f"--hostfile {path} has {len(hosts)} machines, and --nodes is {nodes}; give "
            f"--nodes {max(1, len(hosts))}, or a machine's name a line"
        )
    return hosts


def _host(words: list[str], where: str, devices: int) -> str:
    host, *options = words
    if not HOST.fullmatch(host):
        raise UsageError(f"{where} has {host[:60]!r}, which is no name of a machine")
    for option in options:
        name, _, value = option.partition("=")
        if name != "slots" or not value.isdecimal():
            raise UsageError(f"{where} has {option[:60]!r}; expected slots=NUMBER or nothing")
        if int(value) != devices:
            raise UsageError(
                f"{where} gives {host} {value} slots, and --devices is {devices}; all machines "
                "have as many"
            )
    return host
