"""Every family of transformers' auto-mappings, shrunk, traced, compressed and read back; writes docs/architectures.md.

    python benchmarks/architectures.py [--only FAMILY ...] [--kinds KIND ...] [--results FILE] [--redo] [--failed]

A family is a model type within a kind (causal LM, vision-language, encoder-decoder, speech, text encoder, vision
encoder). Its default configuration is shrunk by the names of its sizes, the model gets random weights and random
tokens, images or sounds, and takes the way of any user: `Compressor(trainer).compress(model, ...)`, GPTQ at 4 bits.
Each runs in a process of its own. Results are lines of JSON in FILE; families that are in it are not run again without
--redo, or --failed for those that did not work.
"""

import argparse
import json
import logging
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _architecture_kinds import KINDS, Family, families
from _architecture_run import Result, try_family
from _architecture_table import markdown

HERE = Path(__file__).resolve().parent
LIMIT_S, LIMIT_BYTES = 180, 14 << 30
"""Of a family: time, and address space."""


def in_a_process(family: Family, limit_s: int, attempt: Callable[[Family], Result] = try_family) -> dict[str, Any]:
    """The result of a family, from a fork of this process, which has imported everything already."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(limit_s)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        with os.fdopen(writer, "w") as pipe:
            json.dump(attempt(family).to_dict(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    code = os.waitstatus_to_exitcode(status)
    reason = f"took more than {limit_s} s" if code == -signal.SIGALRM else f"the process ended with {code}"
    return Result(family.kind, family.model_type, family.class_name, failed="process", reason=reason).to_dict()


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each family."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {f"{row['kind']}/{row['model_type']}": row for row in map(json.loads, lines)}


def sweep(chosen: list[Family], path: Path, limit_s: int, redo: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {} if redo else results_of(path)
    left = [family for family in chosen if family.key not in done]
    start = time.perf_counter()
    for number, family in enumerate(left, 1):
        row = in_a_process(family, limit_s)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        verdict = f"{row['failed']}: {row['reason'][:150]}" if row["failed"] else f"{row['num_quantized']} quantized"
        passed = time.perf_counter() - start
        print(
            f"{number}/{len(left)} {passed:6.0f} s  {family.key}  {row['fed']}  {row['total_s']} s  {verdict}",
            flush=True,
        )


def families_asked_for(doc: str | None, results: str) -> tuple[argparse.Namespace, list[Family]]:
    """Of a script beside this one, which keeps `results`: its arguments, and the families that they mean."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="model types")
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=tuple(KINDS))
    parser.add_argument("--results", type=Path, default=HERE.parent / "outputs" / results)
    parser.add_argument("--part", default="1/1", help="of all families: 1/2 and 2/2 run in two processes")
    parser.add_argument("--limit-s", type=int, default=300)
    arguments = parser.parse_args()
    quiet()
    part, parts = map(int, arguments.part.split("/"))
    chosen = [family for family in families() if family.kind in arguments.kinds][part - 1 :: parts]
    if arguments.only:
        chosen = [family for family in chosen if family.model_type in arguments.only]
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    return arguments, chosen


def quiet() -> None:
    """One thread, and nothing said but what a script prints."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="model types")
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=tuple(KINDS))
    parser.add_argument("--failed", action="store_true", help="run those again that failed")
    parser.add_argument("--results", type=Path, default=HERE.parent / "outputs" / "architectures.jsonl")
    parser.add_argument("--redo", action="store_true")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S)
    parser.add_argument("--markdown", type=Path, default=HERE.parent / "docs" / "architectures.md")
    arguments = parser.parse_args()
    quiet()
    everyone = families()
    chosen = [family for family in everyone if family.kind in arguments.kinds]
    if arguments.only:
        chosen = [family for family in chosen if family.model_type in arguments.only]
    if arguments.failed:
        before = results_of(arguments.results)
        chosen = [family for family in chosen if before.get(family.key, {"failed": True})["failed"]]
    sweep(chosen, arguments.results, arguments.limit_s, arguments.redo or arguments.failed or bool(arguments.only))
    rows = results_of(arguments.results)
    arguments.markdown.write_text(
        markdown([rows[family.key] for family in everyone if family.key in rows], len(everyone))
    )
    print(f"{arguments.markdown}: {sum(not row['failed'] for row in rows.values())} of {len(everyone)} work")


if __name__ == "__main__":
    main()
