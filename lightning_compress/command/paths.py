"""Paths on the command line are what the shell gives, not what Hydra's grammar makes of them.

It would take `1.10` for a number (and write to a folder 1.1), `true` for a yes, and `~` or an accent for an error.
"""

import os
from collections.abc import Sequence

_PATHS = frozenset({"model.weights", "model.tokenizer", "model.config", "json", "graph", "plan"})
"""Keys whose values are paths, beside those that end with `path` or `dir`."""


def with_quoted_paths(overrides: Sequence[str], is_multirun: bool) -> list[str]:
    """Overrides in which a path is a quoted string, its `~` the home folder; of several, as a multirun has them, each.
    What is null, quoted, a list or an interpolation stays as it is.

    >>> with_quoted_paths(["output_dir=1.10", "model.path=a (copy)", "data.max_length=64", "plan=null"], False)
    ['output_dir="1.10"', 'model.path="a (copy)"', 'data.max_length=64', 'plan=null']
    >>> with_quoted_paths(["model.path=a,b"], True)
    ['model.path="a","b"']
    """
    return [_quoted(override, is_multirun) for override in overrides]


def _quoted(override: str, is_multirun: bool) -> str:
    key, equals, value = override.partition("=")
    if not key or not equals or key[0] in "~-" or not (key.lstrip("+") in _PATHS or key.endswith(("path", "dir"))):
        return override
    if is_multirun and not set(value) & set("()[]{}\"'$"):
        return f"{key}={','.join(_one(each.strip()) for each in value.split(','))}"
    return override if is_multirun else f"{key}={_one(value)}"


def _one(value: str) -> str:
    if value.lower() in ("", "null", "???") or value[0] in "\"'[{$" or "\\" in value:  # what Hydra understands
        return value
    quote = "'" if '"' in value else '"'
    return value if quote in value else f"{quote}{os.path.expanduser(value)}{quote}"
