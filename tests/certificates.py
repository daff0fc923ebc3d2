"""Self-signed certificates for localhost, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


class Certificate(NamedTuple):
    cert: Path
    key: Path

    @property
    def trust(self) -> ssl.SSLContext:
        """For a client that knows it."""
        return ssl.create_default_context(cafile=str(self.cert))


def make_certificate(folder: Path, name: str = "server") -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}-key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run(command, check=True, capture_output=True)
    return made
