"""The options of `tandem bench interference`."""

from __future__ import annotations

from .grouped_command import Groups, flag, number, text, whole
from .serving_options import server_options


def interference_groups() -> Groups:
    """All options, under the headings that help has."""
    return {
        "server": server_options(),
        "scene": [
            whole("--victims", default=1, low=1, help="Streams that run."),
            whole("--prompt-tokens", default=4000, low=1, help="Length of the long prompt."),
            whole("--victim-prompt-tokens", default=16, low=1, help="Length of a victim's prompt."),
            whole(
                "--victim-tokens",
                default=4000,
                low=100,
                help="Most tokens that a victim streams; it must last for the round.",
            ),
            number(
                "--alone-seconds",
                default=3.0,
                low=0.1,
                help="Time before the attack in which the victims run undisturbed.",
            ),
            whole("--rounds", default=3, low=1, help="Rounds whose medians are shown."),
            whole("--num-warmups", default=1, low=0, help="Rounds before, which do not count."),
            whole("--seed", default=None, low=0, help="Of the prompts (default: random)."),
        ],
        "results": [
            text("--output-json", metavar="FILE", help="Write the result to a JSON file."),
            flag("--json", "as_json", help="Print it as JSON instead of a table."),
            flag("--disable-tqdm", help="Show no progress bar."),
        ],
    }
