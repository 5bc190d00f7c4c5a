"""Formulas for what jobs take, beside the run on fake tensors: for a check, and for what people know.

The closed forms are for decoders of gated feed-forward layers with RMS norms (Llama, Mistral, Qwen, Gemma, ...) under
scaled-dot-product attention that keeps no scores. Counted by hand from transformers' code: what autograd keeps per
token and layer, what is alive at the widest moment of a layer. Those of calibrations stand on what the algorithm's own
docstrings say of its arrays.
"""

from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor
from transformers import PreTrainedModel

from lightning_compress.algorithms.tiling import ON_GPU
from lightning_compress.foresight.adapters import ALL_LINEAR, packed_bytes
from lightning_compress.foresight.jobs import CalibrationJob, FineTuningJob, InferenceJob, Phase
from lightning_compress.foresight.layouts import Layout
from lightning_compress.foresight.optimizers import state_bytes
from lightning_compress.graph.configs import size_in, varies
from lightning_compress.statistics.sums import BLOCK_ON_GPU

LOSS = {2: (10, 12), 4: (8, 12)}
"""Bytes per token and word of the vocabulary of the causal language model's loss, by the bytes of a logit: forward
(logits, in float32 too if they are not, and their log-softmax), and backward."""

_DO_NOT_FIT = (
    "attn_logit_softcapping",
    "sliding_window",
    "kv_lora_rank",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
)
_OFF = 0.05


@final
@dataclass(frozen=True)
class Decoder:
    """The sizes that the formulas read.

    Attributes:
        hidden, intermediate, layers, vocabulary: numbers of channels, layers and words.
        queries, keys: channels of all their heads together.
        heads: of the queries.
        num_parameters: of the whole model.
        itemsize: bytes of a parameter and of an activation.
        is_tied: the input's embeddings are the output's, too.
        inner_norms: channels of each norm of a layer beside the two of `hidden`: of queries and keys, or ahead of a
            linear layer.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    queries: int
    keys: int
    heads: int
    num_parameters: int
    itemsize: int
    is_tied: bool
    inner_norms: tuple[int, ...] = ()

    @property
    def writes_scores(self) -> bool:
        """Whether attention does on CUDA, where no kernel that keeps them to itself takes its inputs."""
        return self.itemsize == 4 and self.keys != self.queries


def decoder(config: Any, num_parameters: int, itemsize: int) -> Decoder | None:
    """From a transformers config; None if the formulas do not fit: no such decoder; experts; attention that caps its
    scores, compresses keys and values, or sees a window only; layers of another kind (Mamba's), by name or by their
    number of parameters; numbers of other than 2 or 4 bytes."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    sizes = [size for name in names if (size := size_in(config, name)) is not None]
    if (
        len(sizes) < len(names)
        or not hasattr(config, "rms_norm_eps")
        or itemsize not in LOSS
        or any(varies(config, name) or getattr(config, name, None) for name in _DO_NOT_FIT)
        or any(varies(config, name) for name in ("head_dim", "num_key_value_heads"))
        or any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    ):
        return None
    hidden, intermediate, layers, vocabulary, heads = sizes
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    keys = head_dim * (getattr(config, "num_key_value_heads", None) or heads)
    sides, is_tied = (heads * head_dim, keys, heads), bool(getattr(config, "tie_word_embeddings", False))
    found = Decoder(hidden, intermediate, layers, vocabulary, *sides, num_parameters, itemsize, is_tied)
    return found if _is_plain(found) else None


def decoder_of(model: PreTrainedModel) -> Decoder | None:
    """As `decoder`, with the norms that the layers of a model have, by the shapes of their weights."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    found = decoder(model.config, num_parameters, model.dtype.itemsize)
    if found is None:
        return None
    norms = (each for each in model.modules() if type(each).__name__.endswith("Norm"))
    weights = (getattr(each, "weight", None) for each in norms)
    widths = [weight.numel() for weight in weights if isinstance(weight, Tensor)]
    of_layer = widths[: len(widths) // found.layers]  # the last one of the model is one more
    head_dim, of_heads = found.queries // found.heads, [found.queries, found.keys]
    if head_dim not in (found.hidden, found.keys, found.queries):  # one weight for all heads
        of_layer = [of_heads.pop(0) if width == head_dim and of_heads else width for width in of_layer]
    for _ in range(2):
        if found.hidden in of_layer:
            of_layer.remove(found.hidden)
    return replace(found, inner_norms=tuple(of_layer))


def _is_plain(sizes: Decoder) -> bool:
    """Whether layers have the parameters that are counted, but for norms, biases and the like."""
    counted = sizes.layers * sum(rows * columns for rows, columns in _linear_shapes(sizes))
    embeddings = (1 if sizes.is_tied else 2) * sizes.vocabulary * sizes.hidden
    return abs(sizes.num_parameters - embeddings - counted) <= _OFF * counted


def inference_phases(sizes: Decoder, job: InferenceJob) -> list[Phase]:
    """As `jobs.infer`."""
    weights, size = sizes.num_parameters * sizes.itemsize, sizes.itemsize
    row = 2 * sizes.layers * sizes.keys * size  # of the cache, per token
    tokens = job.batch_size * job.context
    # the embeddings, the layer's input, the residual and its norm; gate's activation, up, and their product
    feed_forward = (4 * sizes.hidden + 3 * sizes.intermediate) * size
    norm = sizes.hidden * size + 3 * sizes.hidden * 4  # in float32
    # its end, or queries, what is turned of them twice, and their sum
    attention = max(4 * sizes.hidden + 2 * sizes.queries, 2 * sizes.hidden + 4 * sizes.queries) + 2 * sizes.keys
    inner = max(sizes.inner_norms, default=0) * (size + 8)  # in float32, before and after
    widest = max(feed_forward, norm, attention * size, 4 * sizes.hidden * size + inner)
    length = job.context + max(job.new_tokens - 1, 1)  # the last one is not read again
    return [
        Phase("prefill", weights, cache=tokens * row, working=tokens * widest),
        Phase(
            "decode",
            weights,
            cache=job.batch_size * length * row,
            working=job.batch_size * length * row // sizes.layers,  # a layer's cache, before and after
        ),
    ]


def calibration_forms(sizes: Decoder, job: CalibrationJob, depth: int) -> dict[str, int]:
    """What GPTQ takes of a device under `staged`, with all activations waiting elsewhere: while a batch runs, and while
    a group is solved. Both are at their most at the feed-forward layer's last module, behind all others of the layer,
    or where attention writes scores down.

    Args:
        depth: how many layers ahead weights are brought.
    """
    size, tokens = sizes.itemsize, job.batch_size * job.max_length
    hidden, inner = sizes.hidden, sizes.intermediate
    numel = sum(rows * columns for rows, columns in _linear_shapes(sizes))
    layer = size * (numel + 2 * hidden)
    head = size * (sizes.vocabulary + 1) * hidden  # what is ahead of the last layer
    beside = _gram_bytes(inner)
    # the residual and the norm's result come, the residual and down's input go, but from the last layer
    coming = tokens * 2 * hidden * size
    passing = coming + tokens * (hidden + inner) * size
    ahead, at_the_end = depth * layer, (depth - 1) * layer + head if depth else 0
    # what came; the gate's activation, up and their product, or the last and a block of its Gram in float32
    product = 4 * min(BLOCK_ON_GPU, inner) * inner
    batch = tokens * 2 * hidden * size + max(3 * tokens * inner * size, tokens * inner * size + product)
    # the weight's rows; the Gram, its factor and what that is made of, in float32; or the first two, codes of all rows,
    # and those of a stack with errors in float32, or of a tile six float32 copies and what is tried for each group of
    # 128, while scales are searched
    stack, tile = min(hidden, ON_GPU.stack_rows(inner)), ON_GPU.row_tiles(hidden)[0].stop
    searched = 24 * min(tile * inner, ON_GPU.searched) + 416 * tile * inner // 128
    rows = 8 * inner**2 + (hidden - stack) * inner + max(11 * stack * inner, searched)
    solve = hidden * inner * size + max(12 * inner**2, rows)
    at_last = layer + beside + batch + max(ahead + passing, at_the_end + (passing if depth > 1 else coming))
    return {
        "batch": max(at_last, layer + max(ahead, at_the_end) + _attending(sizes, job)),
        "solve": layer + beside + solve + max(ahead, at_the_end),
    }


def _attending(sizes: Decoder, job: CalibrationJob) -> int:
    """While scores are written down, which CUDA does in float32 where heads share keys: them, their softmax and which
    are masked; the mask; queries, keys and values, turned and repeated; what comes and goes; the output's Gram."""
    if not sizes.writes_scores:
        return 0
    pairs, tokens = job.max_length**2, job.batch_size * job.max_length
    scores = job.batch_size * sizes.heads * pairs * (4 + 4 + 1) + 5 * pairs
    per_token = 6 * sizes.queries + 3 * sizes.keys + 4 * sizes.hidden
    return scores + 4 * tokens * per_token + _gram_bytes(sizes.hidden)


def _gram_bytes(num_channels: int) -> int:
    """Of the blocks of rows of `statistics.sums.GramSum`, float64, each up to its own end."""
    return 4 * num_channels * (num_channels + min(BLOCK_ON_GPU, num_channels))


def finetuning_phases(sizes: Decoder, job: FineTuningJob) -> list[Phase]:
    """As `training.finetune`; none for adapters under autocast, or beside some linear layers only."""
    if job.method != "full":
        return _adapter_phases(sizes, job)
    weights, size = sizes.num_parameters * sizes.itemsize, sizes.itemsize
    tokens = job.batch_size * job.length
    computed = 2 if job.precision == "bf16-mixed" else size
    layer = tokens * _kept_per_token(sizes, computed)
    of_layers = sizes.layers * (tokens * sizes.hidden * size if job.gradient_checkpointing else layer)
    embeddings = sizes.vocabulary * sizes.hidden
    kept = of_layers + tokens * ((4 + size + computed) * sizes.hidden + 4)  # the last norm's
    before, after = (tokens * sizes.vocabulary * each for each in LOSS[computed])
    if computed < size:  # copies that autocast makes, and the last norm's result beside its copy
        kept += computed * (sizes.num_parameters - (0 if sizes.is_tied else embeddings))
        before += tokens * sizes.hidden * size
    if job.optimizer == "adamw_8bit":
        states = state_bytes(sizes.num_parameters)
    else:
        states = {"adamw": 2, "sgd_momentum": 1, "sgd": 0}[job.optimizer] * weights
    largest = embeddings * size
    copies = (
        {"foreach": weights, "single": 2 * largest, "fused": 0}[job.implementation] if job.optimizer == "adamw" else 0
    )
    earlier = weights if job.accumulate > 1 else 0  # gradients
    again = layer if job.gradient_checkpointing else 0
    # the embeddings' gradient comes last, behind the first layer's; if tied, the output's waits for it, for their sum
    last = largest + max(again, 2 * largest) if sizes.is_tied else max(again, largest)
    after = max(after, largest) if sizes.is_tied else after
    return [
        Phase("forward", weights, earlier, states, working=kept + before),
        Phase("backward", weights, earlier, states, working=kept + after),
        Phase("backward", weights, gradients=earlier or weights - largest, optimizer=states, working=last),
        Phase("step", weights, gradients=weights, optimizer=states, stepping=copies),
    ]


def _adapter_phases(sizes: Decoder, job: FineTuningJob) -> list[Phase]:
    """With adapters, in float32, beside every linear layer but the output embedding."""
    if job.precision != "true" or job.lora_targets not in (None, ALL_LINEAR):
        return []
    size, tokens, rank = sizes.itemsize, job.batch_size * job.length, job.lora_rank
    shapes = _linear_shapes(sizes)
    weights = sizes.num_parameters * size
    if job.method == "qlora":
        packed = sum(packed_bytes(rows * columns) for rows, columns in shapes)
        weights -= sizes.layers * (size * sum(rows * columns for rows, columns in shapes) - packed)
    numels = [rank * side for shape in shapes for side in shape]  # of B and A
    trained = 4 * sizes.layers * sum(numels)
    if job.optimizer == "adamw_8bit":
        states = sizes.layers * sum(map(state_bytes, numels))
    else:
        states = {"adamw": 2, "sgd_momentum": 1, "sgd": 0}[job.optimizer] * trained
    layer = tokens * _kept_beside_adapters(sizes, rank)
    norm = tokens * sizes.hidden * 4  # of the last one; the first keeps nothing, but where layers keep their inputs
    kept = sizes.layers * tokens * sizes.hidden * size + norm if job.gradient_checkpointing else sizes.layers * layer
    again = layer if job.gradient_checkpointing else 0
    before, after = (tokens * sizes.vocabulary * each for each in LOSS[size])
    before += tokens * sizes.hidden * size  # the last norm's result
    largest = 4 * max(numels)
    copies = (
        {"foreach": trained, "single": 2 * largest, "fused": 0}[job.implementation] if job.optimizer == "adamw" else 0
    )
    earlier = trained if job.accumulate > 1 else 0  # gradients
    return [
        Phase("forward", weights + trained, earlier, states, working=kept + before),
        Phase("backward", weights + trained, earlier, states, working=kept + max(after, again)),
        Phase("backward", weights + trained, gradients=trained, optimizer=states, working=again),
        Phase("step", weights + trained, gradients=trained, optimizer=states, stepping=copies),
    ]


def _linear_shapes(sizes: Decoder) -> list[tuple[int, int]]:
    """Of a layer, `(O, I)`: queries, keys, values, output; gate, up, down."""
    hidden, inner = sizes.hidden, sizes.intermediate
    attention = [(sizes.queries, hidden), (sizes.keys, hidden), (sizes.keys, hidden), (hidden, sizes.queries)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def _kept_beside_adapters(sizes: Decoder, rank: int) -> int:
    """Bytes that autograd keeps of a layer per token, where its own parameters are frozen.

    Of each norm the input in float32 and the inverse of its size; queries, keys, values and the output of attention,
    and the logarithms of its sums; gate, its activation and up. Linear layers keep nothing; adapters keep their input,
    each a copy of its own if that has to be made float32, and what they make of it.
    """
    size, casts = sizes.itemsize, 4 if sizes.itemsize < 4 else 0
    norms = 2 * (4 * sizes.hidden + 4)
    attention = (2 * sizes.queries + 2 * sizes.keys) * size + 4 * sizes.heads
    inputs = (5 * sizes.hidden + sizes.queries + sizes.intermediate) * casts
    shared = 0 if casts else (2 * sizes.hidden + sizes.intermediate) * size  # results of norms; down's input
    inner = sum(4 * width for width in sizes.inner_norms)
    return norms + inner + attention + 3 * sizes.intermediate * size + inputs + shared + 7 * 4 * rank


def _kept_per_token(sizes: Decoder, computed: int) -> int:
    """Bytes that autograd keeps of a layer per token, where linears compute with numbers of `computed` bytes.

    Of each norm the input and the inverse of its size in float32, what the weight scales, and the result, which linears
    keep; queries, keys, values and the output of attention, and the logarithms of its sums; gate, its activation, up,
    and their product.
    """
    readers = 5 if computed < sizes.itemsize else 2  # of the two results: autocast makes a copy for each linear layer
    norms = 2 * ((4 + sizes.itemsize) * sizes.hidden + 4) + readers * computed * sizes.hidden
    norms += sum((4 + sizes.itemsize) * width for width in sizes.inner_norms)
    attention = (2 * sizes.queries + 2 * sizes.keys) * computed + 4 * sizes.heads
    return norms + attention + 4 * sizes.intermediate * computed


def rules_of_thumb(num_parameters: int) -> dict[str, int]:
    """What people multiply parameters by, in bytes.

    >>> rules_of_thumb(10)["inference, 2 bytes per parameter (bf16)"]
    20
    """
    return {
        "inference, 4 bytes per parameter (fp32)": 4 * num_parameters,
        "inference, 2 bytes per parameter (bf16)": 2 * num_parameters,
        "fine-tuning, 8 bytes per parameter (bf16)": 8 * num_parameters,
    }


def deepspeed(num_parameters: int, layout: Layout, largest_layer: int) -> dict[str, int]:
    """Weights, gradients and AdamW's states of a rank under ZeRO-2 and 3 by DeepSpeed's rule, in bytes; empty for other
    layouts. 18 of a parameter are divided: gradients in half and full precision, weights and two states in full.

    After DeepSpeed's `estimate_zero2_model_states_mem_needs` and its counterpart for ZeRO-3 (`deepspeed/runtime/zero`),
    which has the largest layer's 16-bit weights twice. What is offloaded is the optimizer: 16-bit weights stay.

    Args:
        num_parameters: of the model.
        layout: of the ranks; the rule knows replicas only.
        largest_layer: numbers of its weights.

    >>> deepspeed(100, Layout(data=4, zero=2), 10), deepspeed(100, Layout(data=4, zero=3, offload=True), 10)
    ({'ZeRO-2, 2 P + 18 P / N': 650}, {'ZeRO-3 with offload, 4 L + 2 P / N': 90})
    """
    if layout.zero < 2 or layout.tensor * layout.pipeline > 1:
        return {}
    kept, said = (2 * num_parameters, "2 P") if layout.zero == 2 else (4 * largest_layer, "4 L")
    if layout.offload and layout.zero == 2:
        return {f"ZeRO-2 with offload, {said}": kept}
    if layout.offload:
        return {f"ZeRO-3 with offload, {said} + 2 P / N": kept + 2 * num_parameters // layout.data}
    return {f"ZeRO-{layout.zero}, {said} + 18 P / N": kept + 18 * num_parameters // layout.data}


def llmem(sizes: Decoder, job: FineTuningJob) -> int:
    """Fine-tuning as LLMem has it (arXiv 2404.10933), without the base that it measures: weights in half and in full
    precision, AdamW's states, the outputs of embeddings and layers, and logits, in half precision."""
    tokens = job.batch_size * job.length
    activations = (1 + sizes.layers) * tokens * sizes.hidden * 2
    return (2 + 4 + 8) * sizes.num_parameters + activations + tokens * sizes.vocabulary * 2
