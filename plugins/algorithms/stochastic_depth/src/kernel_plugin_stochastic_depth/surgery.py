"""Which blocks of a model are changed, and how often each is left out."""

from __future__ import annotations

from typing import Any, Literal

from kernel_core.errors import SurgeryError
from torch import fx, nn

from kernel_plugin_stochastic_depth.blocks import Method, StochasticBlock, has_methods, is_residual, make_stochastic

Distribution = Literal["linear", "uniform"]
ADDS = ("add", "add_", "iadd")  # names of the functions and methods behind +, += and torch.add
MOST_STEPS = 20  # of a forward that is looked at; that of a Bottleneck has 13
COMPOSERS = {"ResNetBottleneck": "Bottleneck"}  # what Composer calls torchvision's class


def drop_rates(num_blocks: int, drop_rate: float, distribution: Distribution) -> list[float]:
    """Return the rate of each block, the first one first.

    >>> drop_rates(4, 0.2, "linear")
    [0.05, 0.1, 0.15000000000000002, 0.2]
    """
    if distribution == "uniform":
        return [drop_rate] * num_blocks
    return [drop_rate * number / num_blocks for number in range(1, num_blocks + 1)]


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str = "ResNetBottleneck",
    stochastic_method: Method = "block",
    drop_rate: float = 0.2,
    drop_distribution: Distribution = "linear",
) -> list[str]:
    """Let the residual blocks of ``model`` be skipped at random, in place; return where they are.

    Args:
        model: Any model.
        target_layer_name: The class of the blocks.
        stochastic_method: ``block`` or ``sample``.
        drop_rate: Of the last block, or of all.
        drop_distribution: ``linear``: block l of L at l/L times the rate; ``uniform``: all alike.

    Raises:
        SurgeryError: a block has the parts of a residual block and computes something else with them.
    """
    wanted = COMPOSERS.get(target_layer_name, target_layer_name)
    found = {
        path: module
        for path, module in model.named_modules()
        if wanted in (cls.__name__ for cls in type(module).__mro__) and is_residual(module)
    }
    for path, module in found.items():
        check_form(module, path)
    rates = drop_rates(len(found), drop_rate, drop_distribution)
    for module, rate in zip(found.values(), rates, strict=True):
        make_stochastic(module, rate, stochastic_method)
    return list(found)


def check_form(block: nn.Module, path: str) -> None:
    """Refuse a block whose branch and shortcut are not the ones that would be computed in its place.

    Raises:
        SurgeryError: it has neither methods that say what they are nor the forward of torchvision's blocks.
    """
    if isinstance(block, StochasticBlock) or has_methods(block):
        return
    found, expected = what_it_computes(block), what_it_should_compute(block)
    if found != expected:
        raise SurgeryError(
            f"stochastic_depth: at {path or 'the model itself'} ({type(block).__name__}) the forward computes "
            f"{found or 'what cannot be told from outside'}. Expected {expected}. Give the class the methods "
            "branch(x) and shortcut(x), and output(x) for what follows their sum, or name another class in target_layer_name."
        )


class _Steps(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def what_it_computes(block: nn.Module) -> str:
    """Return the forward of a block as an expression of its parts: ``relu(add(bn2(...), x))``; empty if that is not known."""
    try:
        graph = _Steps().trace(block)
    except Exception:  # whatever a forward that was not written for tracing raises
        return ""
    *steps, end = graph.nodes
    return "" if len(steps) > MOST_STEPS else _expression(end.args[0])


def _expression(step: Any) -> str:
    if not isinstance(step, fx.Node):
        return repr(step)
    if step.op == "placeholder":
        return "x" if step.prev.op == "root" else str(step.target)  # the first argument, or another one
    name = step.target if isinstance(step.target, str) else step.target.__name__
    parts = [_expression(part) for part in (*step.args, *step.kwargs.values())]
    return f"add({', '.join(sorted(parts))})" if name in ADDS else f"{name}({', '.join(parts)})"


def what_it_should_compute(block: Any) -> str:
    """Return the expression of what ``StochasticBlock`` computes, for a block that has the parts."""
    added = "bn2(conv2(relu(bn1(conv1(x)))))"
    added = f"bn3(conv3(relu({added})))" if hasattr(block, "conv3") else added
    return f"relu(add({', '.join(sorted([added, 'x' if block.downsample is None else 'downsample(x)']))}))"
