"""What generating with offloaded weights, cache and activations takes: seconds per lane, and bytes per tier.

Method: FlexGen's cost model (Sheng et al., arXiv 2303.06865, section 4.3 and appendix A.3). A block of `bls` sequences
is computed layer by layer, its weights brought once per layer and token, in batches of `gbs` that the GPU computes one
after the other. Where things are is nine fractions: of the weights (wg, wc, wd), the cache (cg, cc, cd) and the hidden
states (hg, hc, hd), on the GPU, in host memory and on the disk. Every lane's seconds and every tier's bytes is a linear
form in them, so that one description serves a given policy and the search for the best (`generation`).

Where it departs from the appendix, and why:
- A batch's products take no less than its weights take to be read from the GPU's memory, and attention no less than its
  cache. The appendix has rates of products only, which makes two sequences on a T4 2.4 times too fast.
- Attention during decoding on the GPU, of a cache that is elsewhere, is a choice too, not always left to the CPU.
- What goes to the CPU's attention and comes back (query, key, value; output) is counted; the paper's text has it.
- In prefill the scores need memory on the GPU wherever the cache is put then (as in the authors' own program,
  FMInference/FlexLLMGen `experimental/cost_model.py`); hidden states on their way during decoding are of one token.
- Heads may be grouped, feed-forward layers gated, and embeddings (`outside_bytes`) lie on the GPU.

Alternative not taken: that program adds some lanes instead of taking the longest, which fits that runtime's
measurements; the paper's formula says what a runtime could reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from lightning_compress.errors import CompressionError

Phase = Literal["prefill", "decode"]
Tier = Literal["device", "host", "disk"]
Lane = Literal["to_device", "to_host", "disk_read", "disk_write", "compute"]
Form = Mapping[str, float]
"""Factors by fraction; those of `ALWAYS` are added as they are."""
ALWAYS = "1"
FRACTIONS = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")


@final
@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder whose layers are alike.

    Attributes:
        layers, hidden, intermediate, heads: numbers of layers, channels (h1), channels of the feed-forward layer (h2),
            heads of the queries.
        kv_heads: of keys and values; 0: as many as of the queries.
        head_dim: channels per head; 0: hidden / heads.
        num_matrices: of the feed-forward layer, 2, or 3 with a gate.
        weight_itemsize, cache_itemsize, activation_itemsize: bytes of an element.
        outside_bytes: of weights outside the layers, which lie on the GPU.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    num_matrices: int = 2
    weight_itemsize: float = 2
    cache_itemsize: float = 2
    activation_itemsize: float = 2
    outside_bytes: int = 0

    @property
    def queries(self) -> int:
        """Channels of all heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """Channels of all keys' heads together."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer.

        >>> Transformer(layers=48, hidden=7168, intermediate=28672, heads=56).layer_parameters == 12 * 7168**2
        True
        """
        return self.hidden * (2 * self.queries + 2 * self.keys + self.num_matrices * self.intermediate)

    @property
    def layer_bytes(self) -> float:
        """Of the weights of one layer."""
        return self.layer_parameters * self.weight_itemsize

    @property
    def cache_bytes(self) -> float:
        """Of a token's keys and values in one layer."""
        return 2 * self.keys * self.cache_itemsize

    @property
    def state_bytes(self) -> float:
        """Of a token's hidden state."""
        return self.hidden * self.activation_itemsize


@final
@dataclass(frozen=True)
class Hardware:
    """What there is for one GPU.

    Attributes:
        device_bytes, host_bytes, disk_bytes: that tensors may take.
        to_device, to_host: B/s of the link.
        cache_to_host: B/s of new cache, which is many small pieces.
        disk_read, disk_write: B/s.
        prefill_products, decode_products: FLOP/s of products with weights on the GPU.
        prefill_attention, decode_attention: FLOP/s of attention's products on the GPU.
        gpu_memory: B/s at which the GPU reads its memory.
        cpu_attention: FLOP/s of attention's products on the CPU.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    to_device: float
    to_host: float
    cache_to_host: float
    disk_read: float
    disk_write: float
    prefill_products: float
    decode_products: float
    prefill_attention: float
    decode_attention: float
    gpu_memory: float
    cpu_attention: float

    @property
    def budgets(self) -> dict[Tier, int]:
        """Bytes by tier."""
        return {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes}


@final
@dataclass(frozen=True)
class Task:
    """What is generated.

    Attributes:
        prompt_length: tokens of every prompt (s).
        new_tokens: generated for each (n).
        num_prompts: how many there are, so at most in a block; None: any number.
    """

    prompt_length: int
    new_tokens: int
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        counts = {"prompt_length": self.prompt_length, "new_tokens": self.new_tokens}
        if self.num_prompts is not None:
            counts["num_prompts"] = self.num_prompts
        wrong = [f"{name}={count}" for name, count in counts.items() if count < 1]
        if wrong:
            raise CompressionError(
                f"{', '.join(wrong)}: a task has at least one prompt of one token and one new token."
            )


@final
@dataclass(frozen=True)
class Schedule:
    """What is enumerated.

    Attributes:
        gpu_batch_size: sequences that the GPU computes at a time (gbs).
        num_gpu_batches: such batches for which a layer's weights are brought once.
        cpu_attention: attention of a cache that is not on the GPU is computed by the CPU during decoding.
        overlaps: lanes work at the same time, not one after the other.
    """

    gpu_batch_size: int
    num_gpu_batches: int
    cpu_attention: bool
    overlaps: bool = True

    @property
    def block_size(self) -> int:
        """Sequences that share a layer's weights (bls)."""
        return self.gpu_batch_size * self.num_gpu_batches


def lanes(model: Transformer, hardware: Hardware, task: Task, schedule: Schedule, phase: Phase) -> dict[Lane, Form]:
    """Seconds of one layer in prefill, or of one layer and token in decoding (the mean over new tokens), by lane."""
    block, weights = schedule.block_size, model.layer_bytes
    is_prefill = phase == "prefill"
    state = block * model.state_bytes * (task.prompt_length if is_prefill else 1)
    row = block * model.cache_bytes
    context = task.prompt_length + task.new_tokens / 2
    new = row * (task.prompt_length + 1 if is_prefill else 1)
    up, down = 0.0, new / hardware.cache_to_host
    if not is_prefill:
        up, down = context * row, row / hardware.to_host
        if schedule.cpu_attention:
            up = block * model.queries * model.activation_itemsize
            down = block * (model.queries + 2 * model.keys) * model.activation_itemsize / hardware.to_host
    read = 0.0 if is_prefill else context * row
    return {
        "to_device": _over(hardware.to_device, {"wc": weights, "wd": weights, **_away("c", up), **_away("h", state)}),
        "to_host": {**_away("c", down), **_away("h", state / hardware.to_host)},
        "disk_read": _over(hardware.disk_read, {"wd": weights, "cd": read, "hd": state}),
        "disk_write": _over(hardware.disk_write, {"cd": new, "hd": state}),
        "compute": _compute(model, hardware, task, schedule, phase),
    }


def _away(what: str, factor: float) -> dict[str, float]:
    return {f"{what}c": factor, f"{what}d": factor}


def _over(rate: float, form: Form) -> dict[str, float]:
    return {name: factor / rate for name, factor in form.items()}


def _compute(model: Transformer, hardware: Hardware, task: Task, schedule: Schedule, phase: Phase) -> Form:
    length, block = task.prompt_length, schedule.block_size
    least = model.layer_bytes / hardware.gpu_memory
    operations = 2.0 * schedule.gpu_batch_size * model.layer_parameters
    if phase == "prefill":
        products = max(operations * length / hardware.prefill_products, least)
        attention = 4.0 * block * length**2 * model.queries / hardware.prefill_attention
        return {ALWAYS: schedule.num_gpu_batches * products + attention}
    products = schedule.num_gpu_batches * max(operations / hardware.decode_products, least)
    context = length + task.new_tokens / 2
    scores = 4.0 * block * context * model.queries
    here = max(scores / hardware.decode_attention, block * context * model.cache_bytes / hardware.gpu_memory)
    if not schedule.cpu_attention:
        return {ALWAYS: products + here}
    return {ALWAYS: products, "cg": here, **_away("c", scores / hardware.cpu_attention)}


def peaks(model: Transformer, task: Task, schedule: Schedule) -> list[tuple[Tier, Form]]:
    """Bytes that a tier holds at moments that may be its worst."""
    length = task.prompt_length
    rows: list[tuple[Tier, Form]] = [("disk", _home(model, task, schedule, "d", length))]
    for tokens in (length, 1):
        rows += [("device", form) for form in _on_gpu(model, task, schedule, tokens)]
    rows.append(("host", _summed(_home(model, task, schedule, "c", length), _on_cpu_in_prefill(model, task, schedule))))
    rows.append(("host", _summed(_home(model, task, schedule, "c", 1), _on_cpu_in_decoding(model, task, schedule))))
    return rows


def _home(model: Transformer, task: Task, schedule: Schedule, tier: str, tokens: int) -> Form:
    """What stays in a tier, of hidden states those of `tokens` tokens."""
    cached = (task.prompt_length + task.new_tokens) * schedule.block_size * model.layers
    return {
        f"w{tier}": model.layer_bytes * model.layers,
        f"c{tier}": model.cache_bytes * cached,
        f"h{tier}": model.state_bytes * tokens * schedule.block_size,
    }


def _on_gpu(model: Transformer, task: Task, schedule: Schedule, tokens: int) -> list[Form]:
    """With what works there: two layers' weights on their way, a batch's states, and the widest of three steps."""
    batch, size = schedule.gpu_batch_size, model.activation_itemsize
    length = task.prompt_length + task.new_tokens
    staged = {
        ALWAYS: 2 * model.layer_bytes + tokens * batch * model.state_bytes + model.outside_bytes,
        "wg": -2 * model.layer_bytes,
        "hg": -tokens * batch * model.state_bytes,
    }
    projections = batch * tokens * (model.hidden + model.queries + 2 * model.keys) * size
    feed_forward = batch * tokens * (model.hidden + (model.num_matrices - 1) * model.intermediate) * size
    attention: Form = {ALWAYS: batch * (2 * tokens * model.queries + model.heads * tokens**2) * size}
    if tokens == 1:
        cached = batch * length * model.cache_bytes
        scores = batch * (2 * model.queries + model.heads * length) * size
        if schedule.cpu_attention:
            attention = {"cg": scores + cached / 2}
        else:  # of a cache elsewhere a batch's is here, and the next one's comes
            attention = {ALWAYS: scores + 2 * cached, "cg": -1.5 * cached}
    home = _summed(_home(model, task, schedule, "g", tokens), staged)
    return [_summed(home, work) for work in ({ALWAYS: projections}, {ALWAYS: feed_forward}, attention)]


def _on_cpu_in_prefill(model: Transformer, task: Task, schedule: Schedule) -> Form:
    states = task.prompt_length * schedule.gpu_batch_size * model.state_bytes
    return {ALWAYS: model.layer_bytes + states, "wg": -model.layer_bytes, "hg": -states}


def _on_cpu_in_decoding(model: Transformer, task: Task, schedule: Schedule) -> Form:
    batch, length = schedule.gpu_batch_size, task.prompt_length + task.new_tokens
    scores = batch * (model.heads * length + model.hidden) * model.activation_itemsize
    return {
        "wd": model.layer_bytes,
        "hd": 2 * batch * model.state_bytes,
        "cd": 2 * batch * length * model.cache_bytes,
        ALWAYS: scores if schedule.cpu_attention else 0.0,
    }


def _summed(*forms: Form) -> dict[str, float]:
    total: dict[str, float] = {}
    for form in forms:
        for name, factor in form.items():
            total[name] = total.get(name, 0.0) + factor
    return total


def value(form: Form, fractions: Mapping[str, float]) -> float:
    """Of a linear form.

    >>> value({"wg": 2.0, ALWAYS: 1.0}, {"wg": 0.5})
    2.0
    """
    return sum(factor * (1.0 if name == ALWAYS else fractions[name]) for name, factor in form.items())
