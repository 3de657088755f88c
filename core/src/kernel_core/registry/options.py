"""Options of plugins and recipe functions, checked against the signature they are passed to."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from typing import Any

from kernel_core.errors import OptionError
from kernel_core.naming import did_you_mean


def bind_options(
    function: Callable[..., Any],
    owner: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trusted: Collection[str] = (),
) -> inspect.BoundArguments:
    """Check ``args`` and ``kwargs`` against the annotations of ``function`` and convert what can be converted safely.

    Args:
        function: A function or class.
        owner: Whose options they are; messages begin with it.
        args, kwargs: As in a call.
        trusted: Arguments that come from the kernel itself and are passed on as they are.

    Returns:
        The bound arguments, defaults filled in.

    Raises:
        OptionError: an option is unknown, missing or has a value that its annotation does not allow.
    """
    signature = _signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(_misfit(signature, owner, len(args), kwargs) or f"{owner}: {error}.") from None
    for name, value in bound.arguments.items():
        if name in trusted or signature.parameters[name].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            continue
        bound.arguments[name] = _validate(function, owner, name, value)
    bound.apply_defaults()
    return bound


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not isinstance(function, type):
        return inspect.signature(function)
    # a class whose metaclass defines __call__ would show that one's signature
    signature = inspect.signature(function.__init__)  # type: ignore[misc]
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _misfit(signature: inspect.Signature, owner: str, num_args: int, kwargs: Mapping[str, Any]) -> str | None:
    parameters = signature.parameters
    given = {*kwargs, *list(parameters)[:num_args]}
    known = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    takes = f"It takes {', '.join(known)}." if known else "It takes no options."
    for name in kwargs:
        if name not in parameters:
            return f"{owner}.{name}: unknown option.{did_you_mean(name, known)} {takes}"
    for name, parameter in parameters.items():
        if (
            parameter.default is parameter.empty
            and name not in given
            and parameter.kind
            not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
        ):
            expected = (
                f", expected {_describe(parameter.annotation)}" if parameter.annotation is not parameter.empty else ""
            )
            return f"{owner}.{name}: missing{expected}. Give it a value."
    return None


def _describe(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return "None" if annotation is types.NoneType else annotation.__name__
    if typing.get_origin(annotation) is typing.Annotated:
        return _describe(typing.get_args(annotation)[0])  # what bounds it is in pydantic's own words
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " | ".join(map(_describe, typing.get_args(annotation)))
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


@cache
def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    target: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    hints = dict(getattr(target, "__annotations__", {}))
    known = getattr(inspect.unwrap(target), "__globals__", {})
    for name, hint in list(hints.items()):
        try:
            only = types.SimpleNamespace(__annotations__={name: hint})
            hints[name] = typing.get_type_hints(only, globalns=known, include_extras=True)[name]
        except (NameError, TypeError, SyntaxError):
            del hints[name]  # a name imported for type checking only: nothing to check this one against
    return hints


@cache
def _adapter(function: Callable[..., Any], name: str) -> Any:
    import pydantic  # 30 ms; wanted only once there is an option to check

    annotation = _annotations(function).get(name, Any)
    if typing.get_origin(annotation) in (Iterable, Iterator, Generator):
        annotation = Any  # pydantic would hand on an iterator that can be read once
    try:
        return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    except pydantic.errors.PydanticUserError:
        return pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticSchemaGenerationError:
        return pydantic.TypeAdapter(Any)


def _validate(function: Callable[..., Any], owner: str, name: str, value: Any) -> Any:
    import pydantic

    annotation = _annotations(function).get(name, Any)
    try:
        result = _adapter(function, name).validate_python(value)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = "".join(f"[{part!r}]" for part in problem["loc"] if isinstance(part, int))
        raise OptionError(
            f"{owner}.{name}{where}: got {value!r}, expected {_describe(annotation)}. {problem['msg']}."
        ) from None
    # pydantic would read '3' and True as numbers and 'no' and 1 as truth; as an option they are a slip of the pen
    converted = type(result) in (bool, int, float) and type(result) is not type(value)
    if converted and (isinstance(value, bool | str) or isinstance(result, bool)):
        raise OptionError(f"{owner}.{name}: got {value!r}, expected {_describe(annotation)}.")
    return result


def to_json(value: Any) -> Any:
    """Turn an option's value into what JSON can hold.

    What JSON cannot hold is stored by its qualified name and marked: ``{"$object": "torch.nn.modules.linear.Linear"}``.
    Its value is then not part of the lock.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else {"$float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((to_json(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if hasattr(value, "to_timestring"):
        return value.to_timestring()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike | timedelta) or (type(value).__module__ == "torch" and not callable(value)):
        return str(value)  # paths, times, and torch's dtypes, devices and layouts
    named = value if hasattr(value, "__qualname__") else type(value)
    return {"$object": f"{named.__module__}.{named.__qualname__}"}


def describe_options(function: Callable[..., Any]) -> list[dict[str, str]]:
    """Return name, type and default of every option, as text."""
    return [
        {
            "name": name,
            "type": "" if parameter.annotation is parameter.empty else _describe(parameter.annotation),
            "default": "required" if parameter.default is parameter.empty else repr(parameter.default),
        }
        for name, parameter in _signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and getattr(function, "__init__", None) is not object.__init__
    ]
