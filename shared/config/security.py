"""Options of TLS and the cluster token."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from .fields import option


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Options of TLS and the cluster token. Raises ``UsageError`` for incomplete TLS options."""

    tls_cert: str | None = option(
        None,
        "--tls-cert",
        "PEM file with this process's certificate and intermediate ones: the control plane then "
        "uses TLS, the data plane CURVE.",
    )
    tls_key: str | None = option(
        None, "--tls-key", "PEM file with the unencrypted private key of --tls-cert."
    )
    tls_ca: str | None = option(
        None,
        "--tls-ca",
        "PEM file with the cluster's authorities, which must have issued the certificates of both "
        "ends of a connection (default: servers need one of a public authority, clients none).",
    )
    tls_name: str | None = option(
        None,
        "--tls-name",
        "Name in the certificates of other parts (default: the dialled host).",
    )
    cluster_token: str | None = option(
        None,
        "--cluster-token",
        "Secret shared by the parts of this cluster. Arguments are visible to other users, so "
        "pass it in the environment or as a file (default: on loopback tandem serve generates "
        "one, which other commands of the same user find).",
        secret=True,
    )
    cluster_token_file: str | None = option(
        None,
        "--cluster-token-file",
        "File with the cluster token; tokens on further lines are accepted too. It is read again "
        "when it changes, as are the files of --tls-cert, --tls-key and --tls-ca.",
        secret=True,
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            flag, missing = ("--tls-cert", "--tls-key")[:: 1 if self.tls_cert else -1]
            raise UsageError(f"{flag} needs {missing}: a certificate and its key go together")
        for flag, value in (("--tls-ca", self.tls_ca), ("--tls-name", self.tls_name)):
            if value is not None and self.tls_cert is None:
                raise UsageError(f"{flag} {value} needs --tls-cert and --tls-key: there is no TLS")
        if self.cluster_token is not None and self.cluster_token_file is not None:
            raise UsageError("--cluster-token and --cluster-token-file: give one of them")
        if self.cluster_token == "":
            raise UsageError("--cluster-token is empty, which would admit everybody")
