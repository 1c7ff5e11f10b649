"""The options of `tandem bench interference`."""

from __future__ import annotations

from .grouped_command import Groups, flag, number, text, whole
from .serving_options import server_options


def interference_groups() -> Groups:
    """All options, by their groups in help."""
    return {
        "server": server_options(),
        "scene": [
            whole(
                "--victims",
                default=1,
                low=1,
                help="Number of victims: streams that run during the prefill of the long prompt.",
            ),
            whole("--prompt-tokens", default=4000, low=1, help="Length of the long prompt."),
            whole("--victim-prompt-tokens", default=16, low=1, help="Length of a victim's prompt."),
            whole(
                "--victim-tokens",
                default=4000,
                low=100,
                help="Maximum tokens per victim; large enough to outlast a round.",
            ),
            number(
                "--alone-seconds",
                default=3.0,
                low=0.1,
                help="Seconds that the victims run alone before the attack.",
            ),
            whole("--rounds", default=3, low=1, help="Number of measured rounds."),
            whole("--num-warmups", default=1, low=0, help="Number of warm-up rounds."),
            whole(
                "--seed", default=None, low=0, help="Random seed for the prompts (default: random)."
            ),
        ],
        "results": [
            text("--output-json", metavar="FILE", help="Write the result to a JSON file."),
            flag("--json", "as_json", help="Print the result as JSON instead of a table."),
            flag("--disable-tqdm", help="Disable the progress bar."),
        ],
    }
