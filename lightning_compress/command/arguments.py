"""The command line as Hydra's parser has it: it takes no overrides behind its flags, and ours may stand anywhere."""

from collections.abc import Sequence

from lightning_compress.errors import CompressionError

_MULTIRUN = ("-m", "--multirun")
_WITH_VALUES = (
    "--cfg",
    "--config-dir",
    "--config-name",
    "--config-path",
    "--experimental-rerun",
    "--info",
    "--package",
)
"""Hydra's flags that may be given as --FLAG=VALUE."""
_WITH_FOLDER = ("-cd", "--config-dir", "-cp", "--config-path")


def is_multirun(arguments: Sequence[str]) -> bool:
    """
    >>> is_multirun(["recipe=w4a16_gptq,w4a16_rtn", "-m"])
    True
    """
    return not set(_MULTIRUN).isdisjoint(arguments)


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Overrides, and behind them Hydra's flags with what belongs to them.

    >>> overrides_first(["-m", "data=docs", "--config-dir", "cfg", "recipe=a,b", "~callbacks"])
    ['data=docs', 'recipe=a,b', '~callbacks', '-m', '--config-dir', 'cfg']
    """
    before = ["", *arguments]
    is_flag = [
        each.startswith("-") or not ("=" in each or each.startswith("~")) or last in _WITH_FOLDER
        for last, each in zip(before, arguments, strict=False)
    ]
    order = sorted(range(len(arguments)), key=is_flag.__getitem__)
    return [arguments[at] for at in order]


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """`--graph FILE` and `--refit FILE`, as other tools have it, are `graph=FILE` and `refit=[FILE]`.

    >>> as_overrides(["--refit", "a/report.json", "run_on=cpu"])
    ['refit=[a/report.json]', 'run_on=cpu']
    """
    found = list(arguments)
    for flag, written in (("--graph", "graph={}"), ("--refit", "refit=[{}]")):
        if flag in found[:-1]:
            at = found.index(flag)
            found[at : at + 2] = [written.format(found[at + 1])]
    return found


def check_flags(arguments: Sequence[str]) -> None:
    """
    Raises:
        CompressionError: a key is given as other tools have it, of which Hydra's parser says how it is called itself.

    >>> check_flags(["model.path=DIR", "-m", "--config-dir=cfg"])
    """
    for each in arguments:
        flag, equals, _ = each.partition("=")
        if equals and flag.startswith("--") and not any(known.startswith(flag) for known in _WITH_VALUES):
            raise CompressionError(f"{each}: keys have no dashes before them: {each.lstrip('-')}")
