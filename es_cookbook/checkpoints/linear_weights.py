"""Linear weights outside `nn.Linear`: transposed ones, and experts in a tensor of three axes.

Most linear weights of a Hugging Face model are those of its `nn.Linear` layers, (out, in). Two
other kinds are linear weights as well:

- `Conv1D` of GPT-2 computes x W + b, so its weight is stored (in, out).
- A mixture of experts keeps one matrix per expert in parameters with three axes, (experts, out, in)
  or, where the class says `is_transposed`, (experts, in, out). Recognised are the classes of
  transformers' experts interface (`transformers.integrations.moe.use_experts_implementation`).

An expert's matrix is a separate weight, named after the parameter with the expert's number in
brackets, and is a view of that parameter. All that follows from a weight (noise, low-rank factors,
the centre) then has two axes everywhere, and a weight keeps the rows and columns that it is stored
with. Only code that computes with a weight has to know whether it is transposed.

Left out: experts of classes that do not use the interface (Llama 4, JetMoE), whose parameters stay
whole; subclasses of `nn.Linear` that compute something else (some routers); and embedding
tables. They are not linear weights.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import TypeIs

_EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
_MEMBER = re.compile(r"(?P<parameter>.+)\[(?P<expert>\d+)\]")


def member_name(parameter: str, expert: int) -> str:
    """Return the name of one expert's weight in a parameter of three axes.

    >>> member_name("model.layers.0.mlp.experts.down_proj", 3)
    'model.layers.0.mlp.experts.down_proj[3]'
    """
    return f"{parameter}[{expert}]"


def split_member(name: str) -> tuple[str, int | None]:
    """Undo `member_name`; other names are returned with None in place of the expert.

    >>> split_member("model.layers.0.mlp.experts.down_proj[3]")
    ('model.layers.0.mlp.experts.down_proj', 3)
    >>> split_member("lm_head.weight")
    ('lm_head.weight', None)
    """
    found = _MEMBER.fullmatch(name)
    return (found["parameter"], int(found["expert"])) if found else (name, None)


def expert_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's experts' weights, with three axes; () if it has none."""
    if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate")):
        return ()
    own = dict(module.named_parameters(recurse=False))
    return tuple(name for name in _EXPERT_PARAMETERS if name in own and own[name].dim() == 3)


def is_linear(module: nn.Module) -> TypeIs[nn.Linear | Conv1D]:
    """Return whether a module computes x Wᵀ + b, or is `Conv1D`, and nothing else."""
    kind = type(module)
    plain = kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__name__ == "FalconLinear"
    return plain and isinstance(module, nn.Linear | Conv1D)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's linear weights are stored (in, out)."""
    return isinstance(module, Conv1D) or bool(
        expert_parameters(module) and getattr(module, "is_transposed", False)
    )


def linear_weights(model: nn.Module) -> dict[str, bool]:
    """Map each linear weight's name, in the model's order, to whether it is stored (in, out).

    Experts are members; of tied weights there is the first.
    """
    modules = list(model.modules())
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    transposed: dict[int, bool] = {}
    for module in modules:
        if is_linear(module) and id(module.weight) not in tables:
            transposed.setdefault(id(module.weight), is_transposed(module))
    of_experts = _expert_parameters_of(model)
    found: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in of_experts:
            members = (member_name(name, e) for e in range(len(parameter)))
            found |= dict.fromkeys(members, of_experts[id(parameter)])
        elif id(parameter) in transposed:
            found[name] = transposed[id(parameter)]
    return found


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `model.named_parameters()`, with experts' parameters replaced by their members.

    Members are views outside of autograd: writes to one change the parameter.
    """
    of_experts = _expert_parameters_of(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in of_experts:
            for expert, member in enumerate(parameter.detach().unbind()):
                yield member_name(name, expert), member
        else:
            yield name, parameter


def _expert_parameters_of(model: nn.Module) -> dict[int, bool]:
    """Map the id of each parameter that holds experts to whether they are transposed."""
    return {
        id(getattr(module, name)): is_transposed(module)
        for module in model.modules()
        for name in expert_parameters(module)
    }
