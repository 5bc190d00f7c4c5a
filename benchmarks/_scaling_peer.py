"""LLM Compressor's side of `scaling.py`: one rank; RANK and WORLD_SIZE from the environment. Prints one JSON line.

Its own helper for starting ranks wants an accelerator, so gloo is started here; each rank is given its own part of the
samples, because its automatic sharding was seen to give two ranks the same. Not written to disk.
"""

import json
import os
import time

import torch
from _gptq_case import Batch, read_case
from _peer_gptq import solve
from loguru import logger
from torch import distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

if __name__ == "__main__":
    case = read_case()
    logger.remove()
    torch.set_num_threads(case.threads)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    model = LlamaForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    samples = torch.load(case.tokens)["calibration"][: case.num_samples]
    rows = [{"input_ids": row} for row in samples.tensor_split(size)[rank]]
    loader: DataLoader[Batch] = DataLoader(rows, batch_size=case.batch_size)  # type: ignore[arg-type]
    if size > 1:
        dist.barrier()
    start = time.perf_counter()
    solve(model, loader, case)
    print(json.dumps({"rank": rank, "total_s": time.perf_counter() - start}))
    if size > 1:
        dist.destroy_process_group()
