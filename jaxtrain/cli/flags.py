"""Flags that set config keys: `--a.b=c`, `--a.b c`, `--precision bf16`, in any order among other options.

They are turned into `--set a.b=c` before typer sees them, so that CONFIG may stand anywhere.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import CompletionItem, TyperCommand

from jaxtrain.config import ConfigError, parse_value
from jaxtrain.config.schema import RunConfig
from jaxtrain.config.schema_tools import dotted_keys, sections

VERBS = ("train", "resume", "verify-resume", "launch", "plan")
GROUPS = ("tune",)
"""Verbs of two words."""
Set = Annotated[list[str] | None, typer.Option("--set", hidden=True, help="key=value")]


def is_config_flag(token: str) -> bool:
    """Whether a token names a config key: it has a dot, or is one of the plain top keys."""
    if not token.startswith("--") or token == "--":
        return False
    name = token[2:].partition("=")[0]
    plain = [key for key in RunConfig.model_fields if key not in sections()]
    return "." in name or name in plain or name in sections()


def normalise(argv: list[str]) -> list[str]:
    """argv with every config flag as `--set key=value`, for the verbs that take them."""
    words = 2 if argv and argv[0] in GROUPS else 1
    if not argv or argv[0] not in (*VERBS, *GROUPS):
        return argv
    out, rest = argv[:words], argv[words:]
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*out, token, *rest]
        if not is_config_flag(token):
            out.append(token)
            continue
        name, equals, value = token[2:].partition("=")
        if not equals:
            if not rest or is_config_flag(rest[0]):
                raise ConfigError(f"--{name} needs a value: --{name}=VALUE")
            value = rest.pop(0)
        out += ["--set", f"{name}={value}"]
    return out


def overlays(pairs: list[str] | None) -> dict[str, Any]:
    """{dotted key: value} of the `--set` options, the last of each winning."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, _, value = pair.partition("=")
        found.pop(key, None)
        found[key] = parse_value(value)
    return found


class KeyedCommand(TyperCommand):
    """A verb whose options are its own and every config key, for the shell's completion."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """What typer knows, and the config keys that begin as typed."""
        keys = [CompletionItem(key) for key in complete_keys(incomplete)] if incomplete.startswith("--") else []
        return [*super().shell_complete(ctx, incomplete), *keys]


def complete_keys(incomplete: str) -> list[str]:
    """Flags that begin as typed. Without "=": the shell puts a space behind what it completes."""
    return [f"--{key}" for key in dotted_keys() if f"--{key}".startswith(incomplete)]
