"""The `lightning-compress` command and what it can do, composed by Hydra from the groups in `configs/`."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from pathlib import Path
from traceback import format_exception_only
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_class
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from lightning_compress.calibration.resume import versions
from lightning_compress.command.arguments import as_overrides, check_flags, is_multirun, overrides_first
from lightning_compress.command.compress import run_compress
from lightning_compress.command.estimate import estimate as foresee
from lightning_compress.command.evaluation import run_evaluate
from lightning_compress.command.finetuning import run_finetuning_plan
from lightning_compress.command.flags import with_flags
from lightning_compress.command.generation import generation_lines
from lightning_compress.command.inspect import run_inspect
from lightning_compress.command.mistyped import check_groups, complete, mistyped
from lightning_compress.command.models import (
    load_config_only,
    memory_options,
    reads_from_disk,
    with_dequantized,
    with_model_config,
)
from lightning_compress.command.output_file import saved, until_unread, with_own_files
from lightning_compress.command.paths import with_quoted_paths
from lightning_compress.command.planning import run_generation_plan, run_plan, run_probe
from lightning_compress.command.ranks import is_first_rank
from lightning_compress.command.recipe_files import named_recipes
from lightning_compress.distributed.collective import is_first_to_say
from lightning_compress.errors import CommunicationError, CompressionError
from lightning_compress.foresight.estimate import Estimate
from lightning_compress.foresight.jobs import FineTuningJob
from lightning_compress.foresight.machine import Machine
from lightning_compress.foresight.planned import save_planned
from lightning_compress.memory.host import available_bytes
from lightning_compress.recipe.load import config_dir
from lightning_compress.report.estimate import estimate_lines, estimate_table, save_estimate
from lightning_compress.report.finetuning import finetuning_lines, finetuning_table
from lightning_compress.report.graph import graph_lines, save_picture
from lightning_compress.report.plan import machine_table, plan_lines, runners_up_table, save_plain

_WIDEST = 160

USAGE = """lightning-compress COMMAND [GROUP=OPTION ...] [KEY=VALUE ...]

  compress   quantize a model and write a compressed-tensors checkpoint
             lightning-compress compress model.path=DIR data=docs recipe=w4a16_gptq output_dir=OUT
  evaluate   perplexity of a model, compressed or not
             lightning-compress evaluate model.path=DIR data=docs_test
  estimate   what a job will take of memory, from the model's configuration alone
             lightning-compress estimate model.config=FILE job=calibration|inference|finetuning device=cuda

  plan       how to run a compression within what there is, and how long it will take
             lightning-compress plan model.path=DIR data=docs recipe=w4a16_gptq gpu=rtx4090 host=64GiB
  inspect    a model's graph with its cuts, as a table and a picture
             lightning-compress inspect model.path=DIR graph=graph.svg
  probe      measure this machine for `plan`, or correct that by runs: refit=[OUT/report.json]

  lightning-compress COMMAND --help lists the groups, their options, and every key.
  lightning-compress --version says which versions of what this is."""


@until_unread()
def main() -> None:
    """Entry point of the console script."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):  # read when a GPU is first used
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return
    if "--version" in sys.argv:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        return
    if command not in _COMMANDS:
        sys.exit(f"{USAGE}\n\nlightning-compress: there is no command {command!r}.")
    given = list(sys.argv)
    if {"-h", "--help"} & set(given[2:]):
        print(f"== Keys of {command} alone, explained ==\n{_own_keys(command)}")

    def task(config: DictConfig) -> None:
        sys.argv = given  # with which Lightning starts the other ranks
        if command not in _OF_RANKS and not is_first_rank():
            return
        needs_weights = command in ("compress", "evaluate") or (command == "inspect" and config.get("data") is not None)
        _reporting_errors(lambda: _COMMANDS[command](_completed(config, needs_weights)))

    if isinstance(sys.stdout, TextIOWrapper):  # no name is a reason to fail behind a run
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # with which Hydra raises its errors, and does not print them
    try:
        ordered = overrides_first(as_overrides(given[2:]))
        with named_recipes(with_quoted_paths(ordered, is_multirun(ordered))) as arguments:
            check_flags(arguments)
            check_groups(arguments)
            sys.argv = [f"{given[0]} {command}", *arguments]
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)(task)()
    except CompressionError as error:
        _end(_told(error))
    except (HydraException, OmegaConfBaseException) as error:  # the latter of a multirun without output_dir
        _end(_told(CompressionError(mistyped(error, command))))


def _own_keys(command: str) -> str:
    """With the comments in its configuration, which Hydra's help leaves out: they say what values there are."""
    return (config_dir() / f"{command}.yaml").read_text(encoding="utf-8").partition("\n\n")[2]


def _completed(config: DictConfig, needs_weights: bool) -> DictConfig:
    """A command's configuration as the rest has it; it is changed."""
    config = with_own_files(complete(with_dequantized(with_model_config(with_flags(config), needs_weights))))
    if config.get("output_dir") is not None:  # OUT/, as a shell completes it, is OUT: logs go to ${output_dir}_logs
        config.output_dir = str(Path(str(config.output_dir)))
    return config


def compress(config: DictConfig) -> None:
    """Run one compression from a composed configuration; prints the table and where the files are, behind the
    summary that the callback has printed."""
    report = run_compress(config, _output_dir(config))
    if is_first_rank():
        console = _console()
        console.print(report.table())
        files = "" if report.is_partial else f"report: {report.output_dir}/report.html, {report.output_dir}/report.json"
        for line in filter(None, (*report.added_lines(), files)):
            console.print(line, soft_wrap=True)
    if report.is_partial and report.output_dir is not None:  # None: it was a trial
        _end(
            f"lightning-compress: the Trainer was told to stop before the end. {report.output_dir} holds the subgraphs "
            "that are finished and is no checkpoint yet; the same command goes on from them, unless "
            "calibration.resume=never."
        )


def _console() -> Console:
    """One that shows names and paths as they are: `[gptq]` and `:key:` in them are not rich's. What is piped is as wide
    as its tables are, where rich would take 80 columns and cut their headings."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDEST
    return console


def evaluate(config: DictConfig) -> None:
    """Print the perplexity of a model on held-out text."""
    value = run_evaluate(config)
    if is_first_rank():
        print(f"perplexity {value:.4f}")


def estimate(config: DictConfig) -> None:
    """Print what a job will take of memory."""
    found = run_estimate(config)
    console = _console()
    with saved("json", config.json, save_estimate, found, "as JSON: "):
        console.print(estimate_table(found))
        for line in estimate_lines(found):
            console.print(line, soft_wrap=True)


def plan(config: DictConfig) -> None:
    """Print how to run a compression, to generate text or to fine-tune, and what that takes."""
    console = _console()
    kind = None if config.get("job") is None else get_class(config.job["_target_"])
    if kind is None:
        found = run_plan(config)
        with saved("json", config.json, save_planned, found, "run it: lightning-compress compress ... plan="):
            _print_plan(console, plan_lines(found), [runners_up_table(found)], found.machine)
    elif kind is FineTuningJob:
        tuning = run_finetuning_plan(config)
        with saved("json", config.json, save_plain, tuning, "as JSON: "):
            _print_plan(console, finetuning_lines(tuning), [finetuning_table(tuning)], tuning.machine)
    else:
        generation = run_generation_plan(config)
        with saved("json", config.json, save_plain, generation, "as JSON: "):
            _print_plan(console, generation_lines(generation), [], generation.machine)


def _print_plan(console: Console, lines: Iterable[str], tables: Iterable[Table], machine: Machine) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
    for table in (*tables, machine_table(machine)):
        console.print(table)


def probe(config: DictConfig) -> None:
    """Measure this machine and print what was found."""
    machine, left = run_probe(config)
    console = _console()
    console.print(machine_table(machine))
    if left:
        console.print(f"too short to learn from, so their rates are as they were: {', '.join(left)}", soft_wrap=True)


def run_estimate(config: DictConfig) -> Estimate:
    """What the job of `config` will take.

    Raises:
        CompressionError: a model or job that cannot be foreseen, or not within the budgets.
    """
    if config.device not in ("cpu", "cuda"):
        raise CompressionError(f"device={config.device} is not known; plan for cpu or cuda.")
    model = load_config_only(config.model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    from_disk = reads_from_disk(config.model) or (config.model.load == "auto" and size > available_bytes() // 2)
    return foresee(model, config, memory_options(config.memory), from_disk)


def inspect(config: DictConfig) -> None:
    """Print how a model is cut, and draw it."""
    found = run_inspect(config)
    with saved("graph", config.graph, save_picture, found, "picture: "):
        print("\n".join(graph_lines(found)))


def _output_dir(config: DictConfig) -> Path:
    """The folder of this run: in a multirun a subfolder per run, so that none overwrites another."""
    output_dir = Path(config.output_dir)
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return output_dir
    return output_dir / f"{hydra_config.job.num}_{hydra_config.runtime.choices['recipe']}"


def _reporting_errors(run: Callable[[], None]) -> None:
    """Whatever ends a command is a line where it is the user's to mend, and an exit status."""
    try:
        run()
    except MissingMandatoryValue as error:
        _end(f"lightning-compress: {error.full_key}=... has to be given.")
    except SIGTERMException:  # exits with 0 otherwise, as if all had been done
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:  # Lightning's answer to Ctrl-C is 1
        sys.exit(128 + signal.SIGINT if isinstance(error.__context__, KeyboardInterrupt) else error.code)
    except CommunicationError as error:  # each rank's says what it was doing
        sys.exit(_told(error))
    except (HydraException, OmegaConfBaseException) as error:  # Trainer, callbacks or loggers that cannot be made
        _end(_told(CompressionError(mistyped(error))))
    except (CompressionError, FileNotFoundError) as error:
        _end(_told(error))
    except Exception as error:
        if is_first_to_say("".join(format_exception_only(error))):
            raise
        sys.exit(1)


def _told(error: Exception) -> str:
    logging.getLogger(__name__).debug("failed", exc_info=True)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"lightning-compress: {error}{notes}"


def _end(text: str) -> NoReturn:
    """An error that all ranks have is printed by one."""
    sys.exit(text if is_first_to_say(text) else 1)


_OF_RANKS = ("compress", "evaluate")
"""Commands in which all ranks that a launcher starts take part; the others are one process, the first."""
_COMMANDS: dict[str, Callable[[DictConfig], None]] = {
    "compress": compress,
    "evaluate": evaluate,
    "estimate": estimate,
    "plan": plan,
    "probe": probe,
    "inspect": inspect,
}
