"""Models put together at random of what modules do, on batches of many lengths: each linear is solved with what it was
given in the model itself, whatever stands beside what."""

import importlib.util
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import CHANGES_NOTHING, compress_in_memory, gram_sum, linears, make_representable, seen_statistics
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

IMPORTS = "import math\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

STATEMENTS: Mapping[str, Sequence[str]] = {
    "linear": ["x = {linear}(x)"],
    "residual": ["x = x + {linear}(F.gelu(x))"],
    "in place": ["y = {linear}(x)", "y.add_(x)", "x = y"],
    "in place on a view": ["y = {linear}(x)", "v = y[:, 1:]", "v.mul_(2)", "x = x + y"],
    "on a view of what was read": [
        "x = x.clone()",
        "v = x.transpose(0, 1)",
        "y = {linear}(x)",
        "v.mul_(0.5)",
        "x = x + y",
    ],
    "set": ["x = x.clone()", "x[:, ::2] = 0.1", "x[x > 2] = 2", "x = x + {linear}(x)"],
    "attention": [
        "b, n, c = x.shape",
        "q, k, v = (m(x).view(b, n, 4, 4).transpose(1, 2) for m in ({linear}, {linear}, {linear}))",
        "s = q @ k.transpose(-1, -2) / math.sqrt(c) + torch.full((n, n), -1e4).triu(1)",
        "x = x + {linear}((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))",
    ],
    "positions": ["x = x + torch.arange(x.shape[1])[:, None] * 0.01"],
    "size as a number": ["x = x * math.log(x.shape[1] + 1) / min(x.shape[1], 5)"],
    "longer for a while": ["y = torch.cat([x.new_ones(x.shape[0], 2, 16), x], 1)", "x = x + {linear}(y)[:, 2:]"],
    "rows, flat": ["x = {linear}(x.flatten(0, 1)).view_as(x)"],
    "weight alone": ["x = F.linear(x.relu(), {linear}.weight)"],
    "pooled": ["x = x + {linear}(x.mean(1))[:, None]"],
    "in a dict": [
        "state = {{'x': x, 'n': [x.shape[1]]}}",
        "state['x'] = {linear}(state['x'])",
        "x = state['x'] + len(state)",
    ],
    "without gradients": ["with torch.no_grad():", "    x = {linear}(x)"],
    "kept as an attribute": ["self.last = x", "x = {linear}(x)", "x = x + self.last"],
    "over the batch": ["x = x.flip(1).cumsum(1) * 0.2", "x = {linear}(x) - x.amax((1, 2), keepdim=True)"],
    "a module that writes": ["x = x.clone()", "y = {linear}(x)", "{writes}(x)", "x = x + y"],
    "a view from a module": ["x = x.clone()", "v = {views}(x)", "y = {linear}(x)", "v.mul_(0.5)", "x = x + y"],
    "a loop in a module": ["x = {loops}(x)"],
    "a decision in a module": ["x = {decides}(x)"],
    "a decision by values in a module": ["x = {measures}(x)"],
    "a table that grows": ["x = {remembers}(x)"],
}
"""What a forward does with x [B, L, 16]; `{linear}` is a new Linear, other names in braces are modules of `BODIES`."""

BODIES: Mapping[str, Sequence[str]] = {
    "writes": ["x.transpose(0, 1)[0].add_(1)", "return x.view(-1, 16)"],
    "views": ["k = int(x.abs().argmax()) % 2", "return {'v': x[:, k]}['v']"],  # values decide: run for real
    "loops": [
        "h, rows = x[:, 0], []",
        "for t in range(x.shape[1]):",
        "    h = 0.5 * h + x[:, t]",
        "    rows.append(h)",
        "return torch.stack(rows, 1)",
    ],
    "decides": ["if x.shape[1] > 6:", "    return x * 0.5", "return x + x[:, :3].mean(1, keepdim=True)"],
    "measures": ["k = int(x.norm(dim=-1).argmax(1)[0])", "return x + x[:, k:k + 1] if x.abs().max() > 1 else x"],
    "remembers": [
        "if self.table is None or len(self.table) < x.shape[1]:",
        "    self.table = torch.arange(x.shape[1] + 2.0)[:, None]",
        "return x + self.table[:x.shape[1]] * 0.01",
    ],
}


class Program:
    """The source of a model of nested blocks."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self.classes = [self._class(name.title(), ["self.table = None"], "x", body) for name, body in BODIES.items()]
        self._block("Model", depth=0)

    @staticmethod
    def _class(name: str, init: Sequence[str], arguments: str, body: Sequence[str]) -> str:
        lines = [
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            *("        " + line for line in ("super().__init__()", *init)),
            f"    def forward(self, {arguments}):",
            *("        " + line for line in body),
        ]
        return "\n".join(lines)

    def _block(self, name: str, depth: int) -> None:
        init: list[str] = []
        body = [] if depth else [f"x = {self._member('nn.Embedding(50, 16)', init)}(x['ids'])"]
        for _ in range(self._random.randint(2, 4)):
            if depth < 2 and self._random.random() < 0.3:
                self._count += 1
                inner = f"Block{self._count}"
                self._block(inner, depth + 1)
                member = self._member(f"{inner}()", init)
                body += [f"x, n = {member}(x)"] * self._random.choice([1, 1, 2])
            else:
                statement = self._random.choice(list(STATEMENTS.values()))
                body += [self._filled(line, init) for line in statement]
        body.append("return x, x.shape[1]" if depth else f"return {self._member('nn.Linear(16, 16)', init)}(x)")
        self.classes.append(self._class(name, init, "x", body))

    def _member(self, of: str, init: list[str]) -> str:
        name = f"self.m_{'abcdefghijklmnopqrstuvwxyz'[len(init)]}"
        init.append(f"{name} = {of}")
        return name

    def _filled(self, line: str, init: list[str]) -> str:
        for name in ("linear", *BODIES):
            while f"{{{name}}}" in line:
                of = "nn.Linear(16, 16)" if name == "linear" else f"{name.title()}()"
                line = line.replace(f"{{{name}}}", self._member(of, init), 1)
        return line.replace("{{", "{").replace("}}", "}")

    def module(self, folder: Path) -> ModuleType:
        """The program as a module, with the file that tracebacks and errors quote."""
        file = folder / "random_model.py"
        file.write_text("\n".join((IMPORTS, *self.classes)) + "\n")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


class LinearInputs(TorchFunctionMode):
    """Sums of x xᵀ, float64, of what each Linear's weight was multiplied with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(linear.weight): name for name, linear in linears(model).items()}
        self.grams: dict[str, Tensor] = {}
        self.num_calls: dict[str, int] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            name, rows = self._names[id(args[1])], args[0].detach().double().flatten(0, -2)
            self.grams[name] = self.grams.get(name, 0) + rows.T @ rows
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::lightning_compress.errors.CalibrationWarning")  # some are called twice
@pytest.mark.filterwarnings("ignore::lightning_compress.graph.fallback.TraceFallbackWarning")
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_linears_are_solved_with_what_they_are_given(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    module = Program(seed).module(tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # names in modules of models are found there
    model = make_representable(module.Model().eval())
    batches = [
        {"ids": torch.randint(50, (1 + number % 3, length))} for number, length in enumerate((7, 3, 11, 8, 5, 12))
    ]
    with torch.no_grad(), LinearInputs(model) as expected:
        for batch in batches:
            model(batch)
    seen = seen_statistics(monkeypatch)
    schedule = ("staged", "block", "basic")[seed % 3]
    compress_in_memory(model, batches, CHANGES_NOTHING, schedule=schedule)
    assert seen.keys() == expected.grams.keys()
    for name, statistics in seen.items():
        if schedule == "basic" or expected.num_calls[name] == len(
            batches
        ):  # else it is told that later calls are not seen
            torch.testing.assert_close(gram_sum(statistics), expected.grams[name], rtol=1e-4, atol=1e-3)
