"""Every private import of torch and transformers, and everything of theirs that is patched while tracing.

Written against torch 2.11-2.15 and transformers 5.15-5.24. What is used and why:

- Fake tensors (`fakes`) and parts of `make_fx` (`recorder`).
- `masking_utils.find_packed_sequence_indices` reads values; on fake tensors it assumes packing (no fast path).
- `config._experts_implementation`: mixture-of-experts modules loop over the experts that were hit, which fake tensors
  cannot tell; `batched_mm` has the same result shape and no such loop. `grouped_mm` takes fakes of bfloat16 alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._dynamo.source import ConstantSource as ConstantSource
from torch._functorch import pyfunctorch
from torch._guards import SLoc as SLoc
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode,
    disable_proxy_modes_tracing,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.utils import _python_dispatch, _pytree
from torch.utils._sympy import functions as _functions
from transformers import masking_utils
from transformers.integrations import moe

from lightning_compress.graph.configs import configs_of
from lightning_compress.graph.restore import assigned

pytree = _pytree
sympy_functions = _functions
TorchDispatchMode = _python_dispatch.TorchDispatchMode
outside_modes = _python_dispatch._disable_current_modes


@contextmanager
def not_recording() -> Iterator[None]:
    """Within: operations run on fake tensors, but leave no trace."""
    with disable_proxy_modes_tracing(), _temp_remove_pre_dispatch_torch_function_mode():
        yield


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Within `recording`: operations run on real tensors, and leave no trace."""
    with not_recording(), unset_fake_temporarily():
        yield


def _mask_by_broadcast(mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def expand(*indices: Tensor) -> Tensor:
        sizes = [index.shape[0] for index in indices]
        return mask_function(*masking_utils._non_vmap_expansion_sdpa(*indices)).expand(sizes)

    return expand


@contextmanager
def traceable_transformers(root: nn.Module, *, packed_sequences: bool, experts: str = "grouped_mm") -> Iterator[None]:
    """Within: transformers takes the branches it takes on real, unpacked data, and runs experts without a loop."""
    with ExitStack() as stack:
        # as broadcast over index tensors, not as vmap: its indexing operator cannot be recorded before dispatch
        stack.enter_context(assigned(masking_utils, _vmap_expansion_sdpa=_mask_by_broadcast))
        stack.enter_context(assigned(masking_utils, TransformGetItemToIndex=nullcontext))
        stack.enter_context(assigned(moe, _can_use_grouped_mm=lambda _, weight, offs: weight.dtype == torch.bfloat16))
        if not packed_sequences:
            stack.enter_context(assigned(masking_utils, find_packed_sequence_indices=lambda position_ids: None))
        for config in configs_of(root):
            if hasattr(config, "_experts_implementation_internal"):
                stack.enter_context(assigned(config, _experts_implementation_internal=experts))
        yield


@contextmanager
def outside_transforms(tensor: Tensor) -> Iterator[Tensor]:
    """Within, code that `vmap` or `grad` transforms sees a tensor as it is: with what `vmap` does at once in front."""
    with pyfunctorch.temporarily_clear_interpreter_stack():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            dim = torch._C._functorch.maybe_get_bdim(tensor)
            tensor = torch._C._functorch.get_unwrapped(tensor)
            tensor = tensor if dim < 0 else tensor.movedim(dim, 0)
        yield tensor


def message_board(name: str) -> Store:
    """Keys and values that all ranks of the default process group see, kept where they met."""
    return PrefixStore(name, dist.distributed_c10d._get_default_store())
