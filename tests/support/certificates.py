"""Certificate authorities that live as long as a test, and the flags that use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from tandem.shared.config import SecurityConfig


@dataclass(frozen=True)
class Papers:
    """One part's certificate and key, and the authority that it trusts."""

    cert: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> list[str]:
        return [f"--tls-cert={self.cert}", f"--tls-key={self.key}", f"--tls-ca={self.ca}"]

    def config(self, **fields: str) -> SecurityConfig:
        files = {"tls_cert": str(self.cert), "tls_key": str(self.key), "tls_ca": str(self.ca)}
        return SecurityConfig(**(files | fields))


def issue(folder: Path, *names: str) -> Papers:
    """A certificate and key from a new authority, for these hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    papers = Papers(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(papers.ca))
    certificate = authority.issue_cert(*names)
    certificate.private_key_pem.write_to_path(str(papers.key))
    for number, part in enumerate(certificate.cert_chain_pems):
        part.write_to_path(str(papers.cert), append=number > 0)
    return papers
