"""Options of a router about its clients: keys, limits, allowed hosts and origins."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from .fields import option, split_list

# Schemes of --limits-storage.
STORAGES = ("redis://", "rediss://", "redis+unix://")


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Options about clients and their keys."""

    api_key: str | None = option(
        None,
        "--api-key",
        "API keys of clients, separated by commas, each as in a line of --api-key-file (default: "
        "none required).",
        environment=("VLLM_API_KEY",),
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "--api-key-file",
        "File with API keys of clients, one per line: KEY, or NAME: KEY with a name for the access "
        "log and metrics, optionally followed by its own limits rpm=N and tpm=N; read again when "
        "it changes.",
        secret=True,
    )
    admin_api_key: str | None = option(
        None,
        "--admin-api-key",
        "Keys for the /admin routes and /shutdown, which are off without one; in the form of "
        "--api-key, and valid for all other routes too.",
        secret=True,
    )
    admin_api_key_file: str | None = option(
        None,
        "--admin-api-key-file",
        "File with admin keys, in the form of --api-key-file; read again when it changes.",
        secret=True,
    )
    requests_per_minute: int | None = option(
        None,
        "--requests-per-minute",
        "Maximum requests of a key in any minute; further ones get 429 (default: no limit).",
        minimum=1,
    )
    tokens_per_minute: int | None = option(
        None,
        "--tokens-per-minute",
        "Maximum prompt and output tokens of a key in any minute; a request reserves its prompt "
        "and max_tokens, and returns what it does not use (default: no limit).",
        minimum=1,
    )
    limits_storage: str | None = option(
        None,
        "--limits-storage",
        "Redis that counts requests and tokens of keys for all routers that use it: redis://, "
        "rediss:// or redis+unix:// (default: in the memory of each router, also of those of "
        "--router-workers).",
        secret=True,
    )
    allowed_hosts: str | None = option(
        None,
        "--allowed-hosts",
        "Host names that clients may use besides localhost and IP addresses, separated by commas; "
        "*: any (default: *, or none if --host is loopback and there is no --api-key).",
    )
    allowed_origins: str | None = option(
        None,
        "--allowed-origins",
        "Origins of web pages whose scripts may send requests, separated by commas or as a JSON "
        "list; *: any (default: only the router's own).",
    )
    allowed_methods: str = option(
        "*", "--allowed-methods", "Methods that --allowed-origins may use; a list of the same form."
    )
    allowed_headers: str = option(
        "*",
        "--allowed-headers",
        "Headers that --allowed-origins may send; a list of the same form.",
    )
    allow_credentials: bool = option(
        False, "--allow-credentials", "Let scripts of --allowed-origins send cookies and passwords."
    )

    def _check_access(self) -> None:
        """Raise ``UsageError`` for options that would admit everybody, or have no effect."""
        for flag, text in (("--api-key", self.api_key), ("--admin-api-key", self.admin_api_key)):
            if text is not None and not all(part.strip() for part in text.split(",")):
                raise UsageError(f"{flag} has an empty key, which would admit everybody")
        limited = {
            "--requests-per-minute": self.requests_per_minute,
            "--tokens-per-minute": self.tokens_per_minute,
        }
        for flag, limit in limited.items():
            if limit is not None and not self.requires_key:
                raise UsageError(f"{flag} is a limit of each key; it needs --api-key")
        if self.limits_storage is not None:
            if not self.limits_storage.startswith(STORAGES):
                raise UsageError(f"--limits-storage must begin with {', '.join(STORAGES)}")
            if not self.requires_key:
                raise UsageError("--limits-storage is for limits of keys; it needs --api-key")
        for flag, text in (
            ("--allowed-origins", self.allowed_origins),
            ("--allowed-methods", self.allowed_methods),
            ("--allowed-headers", self.allowed_headers),
        ):
            split_list(flag, text)
        if self.allow_credentials and "*" in split_list("", self.allowed_origins):
            raise UsageError("--allow-credentials needs --allowed-origins with names, not *")

    @property
    def requires_key(self) -> bool:
        """True if clients need a key."""
        return self.api_key is not None or self.api_key_file is not None
