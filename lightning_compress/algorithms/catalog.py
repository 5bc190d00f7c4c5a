"""The algorithms a recipe can name. A new one is a file beside this one and a line here."""

from collections.abc import Mapping
from types import MappingProxyType

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.rtn import Rtn

ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType({"gptq": Gptq, "rtn": Rtn})
