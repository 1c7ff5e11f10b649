"""API keys of clients and admins, from flags and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.router.access.api_keys import MAX_KEYS, ApiKeys
from tandem.router.http.exchange import KeyOwner
from tandem.router.options import RouterOptions
from tandem.shared.errors import StartupError, UsageError


def keys(**options: Any) -> ApiKeys:
    return ApiKeys(RouterOptions(**options))


def test_owners_of_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("file-1\n\nalice: file-2 rpm=60 tpm=1000\n bob: file-3\ttpm=5 \nfile-4 rpm=1")
    api_keys = keys(
        api_key="flag-1,carol: flag-2", api_key_file=str(file), admin_api_key="root,dave: chief"
    )
    assert {key: api_keys.owner(key.encode()) for key in ("flag-1", "flag-2", "root", "chief")} == {
        "flag-1": KeyOwner("key-1"),
        "flag-2": KeyOwner("carol"),
        "root": KeyOwner("admin-1", admin=True),
        "chief": KeyOwner("dave", admin=True),
    }
    assert [api_keys.owner(b"file-%d" % number) for number in (1, 2, 3, 4)] == [
        KeyOwner("key-2"),
        KeyOwner("alice", requests_per_minute=60, tokens_per_minute=1000),
        KeyOwner("bob", tokens_per_minute=5),
        KeyOwner("key-3", requests_per_minute=1),
    ]
    for unknown in (b"", b"alice", b"file-2 rpm=60", b"carol: flag-2", b"x" * 100_000):
        assert api_keys.owner(unknown) is None


def test_an_admin_key_in_both_places_is_an_admins() -> None:
    assert keys(api_key="both", admin_api_key="both").owner(b"both") == KeyOwner("admin-1", True)


def test_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.shared.security.watched_files.CHECK_SECONDS", 0.0)
    file = tmp_path / "keys"
    file.write_text("alice: one\n")
    api_keys = keys(api_key_file=str(file))
    assert api_keys.owner(b"one") == KeyOwner("alice")
    file.write_text("alice: one rpm=7\nalice: two\n")
    assert api_keys.owner(b"one") == KeyOwner("alice", requests_per_minute=7)
    assert api_keys.owner(b"two") == KeyOwner("alice")
    file.write_text("alice: one rpm=none\n")
    assert api_keys.owner(b"two") == KeyOwner("alice"), "as it was before"


@pytest.mark.parametrize(
    "line", ["two words", "alice: KEY rpm=0", "alice: KEY rpm=x", "a/b: KEY", "alice: KEY tpm"]
)
def test_a_line_of_another_form_is_refused_without_its_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(StartupError, match="entry 2: not of the form KEY or NAME: KEY") as error:
        keys(api_key_file=str(file))
    assert line not in str(error.value)
    with pytest.raises(UsageError, match="--admin-api-key, entry 1: not of the form"):
        keys(admin_api_key=line)


def test_the_number_of_keys_is_limited(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(f"key{number}" for number in range(MAX_KEYS + 1)))
    with pytest.raises(StartupError, match=f"has {MAX_KEYS + 1} keys: at most {MAX_KEYS}"):
        keys(api_key_file=str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_api_key": ""}, "--admin-api-key has an empty key"),
        ({"requests_per_minute": 5}, "--requests-per-minute is a limit of each key"),
        ({"tokens_per_minute": 5, "admin_api_key": "x"}, "it needs --api-key"),
        ({"allowed_origins": "[1]"}, "neither a JSON list of strings nor words"),
        ({"allowed_origins": "*", "allow_credentials": True}, "names, not \\*"),
    ],
)
def test_options_that_admit_everybody_or_have_no_effect(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        RouterOptions(**options)
