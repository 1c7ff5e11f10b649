"""The options of a cluster that one command starts for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.__main__ import cli
from tandem.shared.config import EngineConfig, HandoffConfig, RouterConfig, ServeConfig
from tandem.shared.config.command_line import fill, to_arguments
from tandem.shared.launch.temporary import for_own_use, log_folder, mcp_labels, of_engine


def test_a_cluster_of_one_engine_has_defaults_and_a_free_port(tmp_path: Path) -> None:
    values = of_engine(EngineConfig(model="m", block_size=32), tmp_path)
    assert fill(EngineConfig, values) == EngineConfig(model="m", block_size=32)
    assert fill(HandoffConfig, values) == HandoffConfig()
    assert fill(ServeConfig, values) == ServeConfig(log_dir=str(tmp_path))
    assert "--port=0" in to_arguments(fill(RouterConfig, values))


@pytest.mark.parametrize("key", [None, "secret", "alice: secret"])
def test_this_command_has_a_key_of_its_own_if_clients_need_one(key: str | None) -> None:
    arguments = [] if key is None else ["--api-key", key]
    values = cli.commands["serve"].make_context("serve", arguments).params
    options, connection = for_own_use(values, fixed_port=False)
    if key is None:
        assert options["api_key"] is None and connection.key == ""
    else:
        assert options["api_key"] == f"{key},this-terminal: {connection.key}"
        assert len(connection.key) == 32
    assert (options["port"], options["reasoning_parser"]) == (0, "auto")
    assert for_own_use(values, fixed_port=True)[0]["port"] == 8000


def test_a_chat_may_use_the_tools_that_the_router_has(tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"files": {"command": "x"}, "web": {}}}')
    values = {"mcp_command": "x", "mcp_config": str(tmp_path / "mcp.json")}
    assert mcp_labels(values) == "mcp,files,web"
    assert mcp_labels({"mcp_command": None, "mcp_config": None}) is None


def test_logs_stay_if_the_cluster_fails() -> None:
    with log_folder() as folder:
        (folder / "router.log").touch()
    assert not folder.exists()
    with pytest.raises(ValueError), log_folder() as folder:
        raise ValueError
    assert folder.exists()
    folder.rmdir()
    with pytest.raises(KeyboardInterrupt), log_folder() as folder:
        raise KeyboardInterrupt
    assert not folder.exists()
