"""Certificates of an authority of a test's own, which openssl makes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

_CONFIG = """
[ca]
default_ca = test
[test]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[leaf]
subjectAltName = IP:127.0.0.1
"""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder: `ca.pem` is its certificate."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        (folder / "index.txt").touch()
        (folder / "ca.cnf").write_text(_CONFIG.format(folder=folder))
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={folder.name}",
            "-keyout", folder / "ca.key", "-out", folder / "ca.pem",
        )  # fmt: skip
        return cls(folder)

    def issue(self, name: str, into: Path, lifetime_s: float = 86_400) -> tuple[Path, Path]:
        """Writes `NAME.pem` and `NAME.key`, for 127.0.0.1, valid from now for `lifetime_s`."""
        into.mkdir(exist_ok=True)
        certificate, key, request = into / f"{name}.pem", into / f"{name}.key", into / f"{name}.csr"
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        now = datetime.now(UTC)
        begin, end = (
            f"{each:%Y%m%d%H%M%SZ}" for each in (now - timedelta(hours=1), now + timedelta(seconds=lifetime_s))
        )
        _openssl(
            "ca", "-batch", "-notext", "-config", self.folder / "ca.cnf", "-extensions", "leaf",
            "-cert", self.certificate, "-keyfile", self.folder / "ca.key", "-in", request, "-out", certificate,
            "-startdate", begin, "-enddate", end,
        )  # fmt: skip
        return certificate, key


def _openssl(*arguments: Any) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True)
