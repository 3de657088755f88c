import enum
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from kernel_core import Algorithm, Time
from kernel_core.errors import OptionError
from kernel_core.registry.options import to_json
from pydantic import Field
from torch import nn


class Sharpen(Algorithm):
    def __init__(
        self,
        rho: Annotated[float, Field(gt=0)] = 0.05,
        mode: Literal["a", "b"] = "a",
        names: list[str] | None = None,
        function: Callable[..., Any] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.rho, self.mode, self.module = rho, mode, module


class Needs(Algorithm):
    def __init__(self, size: int) -> None:
        self.size = size


class Bare(Algorithm):
    pass


def test_options_are_recorded_with_defaults_for_instances_too() -> None:
    module = nn.Linear(1, 1)
    plugin = Sharpen(1, mode="b", module=module)
    assert plugin.rho == 1.0
    assert plugin.module is module
    assert plugin.options == {"rho": 1.0, "mode": "b", "names": None, "function": None, "module": module}
    assert repr(Sharpen()).startswith("Sharpen(rho=0.05, mode='a'")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"roh": 1.0}, r"sharpen\.roh: unknown option\. Did you mean 'rho'\? It takes rho, mode"),
        ({"rho": "big"}, r"sharpen\.rho: got 'big', expected .*float"),
        ({"rho": "0.1"}, r"sharpen\.rho: got '0\.1', expected"),
        ({"rho": True}, r"sharpen\.rho: got True, expected"),
        ({"rho": -1.0}, r"sharpen\.rho: got -1\.0, .*greater than 0"),
        ({"mode": "c"}, r"sharpen\.mode: got 'c', expected Literal\['a', 'b'\]"),
        ({"names": ["x", 3]}, r"sharpen\.names\[1\]: got \['x', 3\]"),
        ({"module": 3}, r"sharpen\.module: got 3"),
    ],
)
def test_a_wrong_option_is_one_clear_error(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sharpen(**kwargs)


def test_a_missing_option_names_what_is_expected() -> None:
    with pytest.raises(OptionError, match=r"needs\.size: missing, expected int\. Give it a value"):
        Needs()  # type: ignore[call-arg]


def test_a_plugin_without_options_takes_none() -> None:
    with pytest.raises(OptionError, match=r"bare: unknown option p\. It takes no options"):
        Bare(p=1)  # type: ignore[call-arg]


def test_an_id_belongs_to_every_plugin() -> None:
    assert Bare(id="second").id == "second"  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"bare\.id: got 'a b'"):
        Bare(id="a b")  # type: ignore[call-arg]


def test_what_json_cannot_hold_is_stored_by_name_and_marked() -> None:
    class Mode(enum.Enum):
        FAST = 1

    plain = [Mode.FAST, torch.bfloat16, torch.device("cpu"), Path("a/b"), timedelta(seconds=3)]
    assert to_json(plain) == [f"{Mode.__qualname__}.FAST", "torch.bfloat16", "cpu", "a/b", "0:00:03"]
    assert to_json({"f": nn.Linear, "m": nn.ReLU(), "t": Time(3, "ba"), "s": {2, 1}, "x": float("inf")}) == {
        "f": {"$object": "torch.nn.modules.linear.Linear"},
        "m": {"$object": "torch.nn.modules.activation.ReLU"},
        "t": "3ba",
        "s": [1, 2],
        "x": {"$float": "inf"},
    }


def test_an_annotation_that_cannot_be_resolved_leaves_the_others_checked() -> None:
    class Partly(Algorithm):
        def __init__(self, device: "NowhereImported" = None, size: "int" = 1) -> None: ...  # type: ignore[name-defined] # noqa: F821

    Partly(device="anything")
    with pytest.raises(OptionError, match=r"partly\.size: got 'x', expected int"):
        Partly(size="x")


def test_an_iterable_can_be_read_twice_and_positions_count_as_given() -> None:
    class Words(Algorithm):
        def __init__(self, first: int, words: Iterable[str] = ()) -> None:
            self.words = words

    plugin = Words(1, ["a", "b"])
    assert [*plugin.words, *plugin.words] == ["a", "b", "a", "b"]
    with pytest.raises(OptionError, match=r"words: too many positional"):
        Words(1, ["a"], 3)  # type: ignore[call-arg]


def test_truth_is_not_read_out_of_text_or_numbers() -> None:
    class Switch(Algorithm):
        def __init__(self, on: bool = False) -> None: ...

    for value in ("no", "yes", 1, 0):
        with pytest.raises(OptionError, match=r"switch\.on: got .*, expected bool"):
            Switch(on=value)  # type: ignore[arg-type]


def test_names_that_every_plugin_has_cannot_be_options() -> None:
    class Named(Algorithm):
        def __init__(self, name: str = "x") -> None: ...

    with pytest.raises(OptionError, match=r"named\.name: every plugin has an attribute of that name"):
        Named()
