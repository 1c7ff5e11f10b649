"""Names of models on a hub in the form of ``--model``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError

HUGGING_FACE, MODELSCOPE = "huggingface", "modelscope"
_REPOSITORY = r"(?P<repository>[\w.-]+/[\w.-]+)"
_TAG, _REVISION = r"(?::(?P<tag>[^:@]+))", r"(?:@(?P<revision>[^:@]+))"
# owner/name, :tag and @revision in either order.
_SHORT = re.compile(
    rf"{_REPOSITORY}(?:{_TAG}?{_REVISION}?|(?:@(?P<revision_first>[^:@]+)):(?P<tag_last>[^:@]+))"
)
_FILE = re.compile(rf"{_REPOSITORY}/(?P<tag>[^:@]+\.gguf){_REVISION}?", re.IGNORECASE)
_PAGE = re.compile(
    rf"{_REPOSITORY}/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?P<tag>[^?#]+\.gguf))?/?(?:[?#].*)?",
    re.IGNORECASE,
)
_HOSTS = re.compile(
    r"(?:https?://)?(?:www\.)?"
    r"(?:(?P<huggingface>huggingface\.co|hf\.co)|(?P<modelscope>modelscope\.(?:cn|ai)))"
    r"/(?:models/)?",
    re.IGNORECASE,
)
_PREFIX = f"{MODELSCOPE}:"
_PLAIN = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub: its repository, and a branch, tag or commit. In a repository of GGUF files,
    ``tag`` is a file's quantisation or its name."""

    repository: str
    revision: str | None = None
    tag: str | None = None
    hub: str = HUGGING_FACE

    def __str__(self) -> str:
        """The name in the form of ``--model``."""
        hub = _PREFIX if self.hub == MODELSCOPE else ""
        tag = f":{self.tag}" if self.tag else ""
        return hub + self.repository + tag + (f"@{self.revision}" if self.revision else "")

    @property
    def file(self) -> str | None:
        """The GGUF file that the tag names."""
        return self.tag if self.tag and self.tag.lower().endswith(".gguf") else None

    @property
    def for_clients(self) -> str:
        """The model's name for clients, which does not depend on the revision or on a file."""
        return f"{self.repository}:{self.tag}" if self.tag and not self.file else self.repository


def hub_name(text: str) -> HubName | None:
    """Parse a name such as ``owner/name``, ``owner/name@revision``, ``owner/name:Q4_K_M``,
    ``owner/name/file.gguf``, the URL of a page of the hub, or ``modelscope:owner/name``.

    Returns ``None`` for anything else, which may be a path."""
    hub, rest, page = HUGGING_FACE, text, _HOSTS.match(text)
    if text.startswith(_PREFIX):
        hub, rest = MODELSCOPE, text.removeprefix(_PREFIX)
    elif page is not None:
        hub = MODELSCOPE if page["modelscope"] else HUGGING_FACE
        rest = text[page.end() :]
        if match := _PAGE.fullmatch(rest):
            return HubName(match["repository"], match["revision"], match["tag"], hub)
        rest = rest.rstrip("/")
    match = _SHORT.fullmatch(rest) or _FILE.fullmatch(rest)
    if match is None or match["repository"].lower().endswith(".gguf"):
        return None
    if match["repository"].startswith((".", "~")):
        return None
    parts = match.groupdict()
    revision = parts["revision"] or parts.get("revision_first")
    return HubName(match["repository"], revision, parts["tag"] or parts.get("tag_last"), hub)


def full_name(
    model: str, *, file: str | None = None, revision: str | None = None, modelscope: bool = False
) -> str:
    """The name of a model, completed by options. Raises ``UsageError``."""
    if modelscope and _PLAIN.match(model) and not model.startswith(_PREFIX):
        model = _PREFIX + model
    if file is None and revision is None:
        return model
    name = hub_name(model)
    option, value = ("--f", file) if file is not None else ("--revision", revision)
    if name is None:
        raise UsageError(
            f"{option} {value!r} is for a model on a hub, but {model!r} is not the name of one, "
            f"such as Qwen/Qwen3-0.6B"
        )
    if file is not None and not file.lower().endswith(".gguf"):
        raise UsageError(
            f"--f {file!r} is not a .gguf file, and only chooses one of those in a repository; "
            f"leave it out for a model in safetensors"
        )
    for value, flag, old in (
        (file, "--f", name.tag),
        (revision, "--revision", name.revision),
    ):
        if value is not None and old is not None and old != value:
            raise UsageError(f"{flag} {value!r} contradicts {old!r} in the model's name {model!r}")
        if value is not None and re.search("[:@]", value):
            raise UsageError(f"{flag} {value!r} must not contain ':' or '@'")
    return str(HubName(name.repository, revision or name.revision, file or name.tag, name.hub))
