"""Finds the modules that policies match, and has them changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kernel_core.errors import SurgeryError
from torch import nn

from kernel_plugin_alibi.bias import DEFAULT_MAX_BIAS_BYTES
from kernel_plugin_alibi.policies import AlibiRequest, AttentionPolicy, Change
from kernel_plugin_alibi.transformers_policies import builtin_policies


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int | None = None,
    policies: Mapping[type[nn.Module], AttentionPolicy] | None = None,
    *,
    max_bias_bytes: int = DEFAULT_MAX_BIAS_BYTES,
) -> list[Change]:
    """Replace position embeddings by linear attention biases, in place, wherever a policy matches.

    Biases are built for the lengths at hand, so no limit costs anything by itself. A module that already has its ALiBi
    form is left as it is, limits included.

    Args:
        model: Any module.
        max_sequence_length: The longest sequence to allow, in positions; None for no limit.
        policies: Module class to policy; the exact class of a module counts, then its nearest base. What is inside a
            matching module is left to its policy. None means ``builtin_policies()``; to add to those, pass
            ``{**builtin_policies(), MyModel: my_policy}``.
        max_bias_bytes: The most memory that one bias may take; a forward pass that would need more is an error.

    Returns:
        The changes, empty if nothing matched.

    Raises:
        SurgeryError: a matching module cannot be changed.
        OptionError: a limit is not a positive whole number.
        PluginLoadError: transformers is missing or too old, and ``policies`` is None.

    Source:
        Press, Smith, Lewis, Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation
        (ICLR 2022).

    Example:
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        >>> changes = apply_alibi(model, max_sequence_length=4096)
    """
    request = AlibiRequest(model, max_sequence_length, max_bias_bytes)
    request.bias(num_heads=1)  # the limits are checked even if nothing matches
    chosen = builtin_policies() if policies is None else policies
    return [
        replace(change, path=".".join(filter(None, (path, change.path))))
        for path, module, policy in list(_matches(model, chosen))
        for change in policy(module, request)
    ]


def _matches(
    model: nn.Module, policies: Mapping[type[nn.Module], AttentionPolicy]
) -> Iterator[tuple[str, nn.Module, AttentionPolicy]]:
    waiting, seen = [("", model)], set[int]()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        policy = next((policies[base] for base in type(module).__mro__ if base in policies), None)
        if policy is not None:
            yield path, module, policy
        else:
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            waiting += reversed(children)


def merge_policies(
    answers: Iterable[Mapping[type[nn.Module], AttentionPolicy]],
) -> tuple[dict[type[nn.Module], AttentionPolicy], list[str]]:
    """Join the answers of other packages with the built-in policies; the later answer for a class counts.

    Returns:
        The policies, and the names of classes that more than one answer gave.

    Raises:
        SurgeryError: an answer is not a mapping from module classes to callables.
    """
    merged: dict[type[nn.Module], AttentionPolicy] = {}
    clashes = []
    for answer in answers:
        _check_answer(answer)
        clashes += [cls.__qualname__ for cls in answer if cls in merged]
        merged |= answer
    return builtin_policies() | merged, clashes


def _check_answer(answer: object) -> None:
    if isinstance(answer, Mapping) and all(
        isinstance(cls, type) and issubclass(cls, nn.Module) and callable(policy) for cls, policy in answer.items()
    ):
        return
    raise SurgeryError(
        f"alibi.alibi_attention_policies: got {answer!r}. Expected a mapping from module classes to policies. "
        "Return {MyModel: my_policy}, where my_policy(module, request) returns a list of Change."
    )
