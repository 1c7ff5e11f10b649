"""``tandem completion``: shell completion of commands and options."""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from .help_page import HelpfulCommand
from .implied import IMPLIED, with_command

PROGRAM, VARIABLE = "tandem", "_TANDEM_COMPLETE"

# click's own scripts for zsh and fish do not complete values after `--name=`, and cut off
# descriptions at the first comma.
ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local kind value about
    local -a found plain described
    found=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT - 1)) \\
        %(complete_var)s=zsh_complete %(prog_name)s 2> /dev/null)}")
    [[ $words[CURRENT] == --*=* ]] && compset -P 1 '*='
    for kind value about in "${found[@]}"; do
        case $kind in
            plain)
                if [[ $about == _ ]]; then plain+=("$value"); else described+=("$value:$about"); fi
                ;;
            file) _files ;;
            dir) _files -/ ;;
        esac
    done
    (( $#described )) && _describe -V %(prog_name)s described
    (( $#plain )) && compadd -V %(prog_name)s -a plain
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
FISH = """\
function %(complete_func)s
    set -l word (commandline --current-token --cut-at-cursor)
    set -l option (string match --regex -- '^--[^=]+=' $word)
    set -lx COMP_WORDS (commandline --current-process --cut-at-cursor)
    set -lx COMP_CWORD $word
    for line in (%(complete_var)s=fish_complete %(prog_name)s 2> /dev/null)
        set -l found (string split --max 1 , -- $line)
        switch $found[1]
            case plain
                echo "$option$found[2]"
            case file
                for path in (__fish_complete_path $found[2])
                    echo "$option$path"
                end
            case dir
                for path in (__fish_complete_directories $found[2])
                    echo "$option$path"
                end
        end
    end
end

complete --no-files --command %(prog_name)s --arguments '(%(complete_func)s)'
"""


class _TandemCompletion(ShellComplete):
    """Completion that offers the options of ``tandem serve`` if there is no command."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(with_command(self.cli, args), incomplete)
        if not args and incomplete.startswith("--"):
            own = {item.value for item in items}
            implied = super().get_completions([IMPLIED], incomplete)
            items += [item for item in implied if item.value not in own]
        return items


class _Bash(_TandemCompletion, BashComplete):
    def get_completion_args(self) -> tuple[list[str], str]:
        """The words without ``=``: bash splits ``--name=value`` into three."""
        args, incomplete = super().get_completion_args()
        return [word for word in args if word != "="], incomplete


class _Zsh(_TandemCompletion, ZshComplete):
    source_template = ZSH


class _Fish(_TandemCompletion, FishComplete):
    source_template = FISH


COMPLETIONS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
for _name, _class in COMPLETIONS.items():
    add_completion_class(_class, _name)


@click.command("completion", cls=HelpfulCommand)
@click.argument("shell", type=click.Choice(list(COMPLETIONS)), metavar="SHELL")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script by which SHELL (bash, zsh or fish) completes commands and options of tandem.

    \b
    bash: echo 'eval "$(tandem completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(tandem completion zsh)"' >> ~/.zshrc (after compinit)
    fish: tandem completion fish > ~/.config/fish/completions/tandem.fish
    """
    root = context.find_root().command
    # Not click's `source`, which would start bash to check its version.
    script = COMPLETIONS[shell](root, {}, PROGRAM, VARIABLE)
    click.echo(script.source_template % script.source_vars())
