"""vLLM's side of `vllm_check.py`, in vLLM's own environment: what each checkpoint makes of the prompts.

    python benchmarks/_vllm_served.py FOLDER [--stand-ins] [--jobs N] [--engine '{"gpu_memory_utilization": 0.05}']

Serves every checkpoint FOLDER/MODEL/RECIPE in a process of its own, forked from one that has imported vLLM, and writes
beside it vllm.log and vllm.json: {"logprobs": [[...]], "greedy": [[...]], "stand_in": bool}, or {"refused": message};
both with vLLM's version and the device. Originals come first: where vLLM refuses one, it is not asked for the rest.
"""

import argparse
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

# Read while vLLM is imported: no server process, no threads bound to cores, a small cache, nothing from the Hub. Forked
# processes can use a GPU only where counting devices has not initialized CUDA.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")

import vllm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

NEW_TOKENS = 16


def serve(folder: Path, dtype: str, prompts: list[list[int]], engine: dict[str, Any]) -> dict[str, object]:
    llm = LLM(model=str(folder), dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8, **engine)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=0, ignore_eos=True)
    answers = llm.generate([TokensPrompt(prompt_token_ids=each) for each in prompts], sampling, use_tqdm=False)
    logprobs = [
        [answer.prompt_logprobs[position][token].logprob for position, token in enumerate(prompt) if position]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {"logprobs": logprobs, "greedy": [list(answer.outputs[0].token_ids) for answer in answers]}


def write(folder: Path, result: dict[str, object]) -> None:
    by = {"vllm": vllm.__version__, "device": current_platform.get_device_name()}
    (folder / "vllm.json").write_text(json.dumps({**result, **by}))


def in_child(folder: Path, cases: dict[str, Any], engine: dict[str, Any], stand_ins: ModuleType | None) -> None:
    """Serves one checkpoint and ends the process; what vLLM prints goes to vllm.log."""
    log = (folder / "vllm.log").open("w")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    try:
        result = serve(folder, cases["dtypes"][folder.parent.name], cases["prompts"], engine)
        result["stand_in"] = stand_ins is not None and stand_ins.were_used()
    except Exception as error:  # whatever it is, it is this checkpoint's result
        traceback.print_exc()
        result = {"refused": " ".join(f"{type(error).__name__}: {error}".split())}
    write(folder, result)
    sys.stderr.flush()
    os._exit(0)


def wait_for_one(running: dict[int, Path]) -> None:
    process, status = os.wait()
    folder = running.pop(process)
    if status:
        write(folder, {"refused": f"the process ended with {status}"})
    print(f"{folder.parent.name}/{folder.name}", file=sys.stderr, flush=True)


def serve_all(folders: list[Path], jobs: int, *arguments: Any) -> None:
    running: dict[int, Path] = {}
    for folder in folders:
        if len(running) == jobs:
            wait_for_one(running)
        process = os.fork()
        if not process:
            in_child(folder, *arguments)
        running[process] = folder
    while running:
        wait_for_one(running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stand-ins", action="store_true", help="compute what vLLM has no kernel for")
    parser.add_argument("--jobs", type=int, default=1, help="checkpoints served at once")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vLLM's LLM, in JSON")
    arguments = parser.parse_args()
    cases = json.loads((arguments.folder / "cases.json").read_text())
    stand_ins = importlib.import_module("_vllm_stand_ins") if arguments.stand_ins else None
    if stand_ins is not None:
        stand_ins.use()
    folders = [config.parent for config in sorted(arguments.folder.glob("*/*/config.json"))]
    shared = (cases, arguments.engine, stand_ins)
    serve_all([folder for folder in folders if folder.name == "original"], arguments.jobs, *shared)
    served = []
    for folder in folders:
        original = json.loads((folder.parent / "original" / "vllm.json").read_text())
        if folder.name != "original" and "refused" in original:
            write(folder, {"refused": "not tried, as the original is refused"})
        elif folder.name != "original":
            served.append(folder)
    serve_all(served, arguments.jobs, *shared)


if __name__ == "__main__":
    main()
