"""What is replaced, what is kept, and that nothing is lost."""

import pytest
import torch
from kernel_core.errors import OptionError
from kernel_plugin_blurpool import BlurChange, BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool, blurred_conv
from torch import nn
from torch.nn.utils import parametrizations


def small_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),  # too few channels
        nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        nn.Conv2d(16, 16, 3, padding=1),  # not strided
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.MaxPool2d(3, 1, 1),  # not strided
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def test_strided_layers_with_enough_channels_are_replaced_and_reported() -> None:
    net = small_net()
    assert apply_blurpool(net) == [
        BlurChange("1.2", "MaxPool2d", "BlurMaxPool2d"),
        BlurChange("3", "Conv2d", "BlurConv2d"),
    ]
    assert type(net[3]) is BlurConv2d
    assert type(net.get_submodule("1.2")) is BlurMaxPool2d


def test_flags_and_min_channels_choose_what_is_replaced() -> None:
    assert [change.path for change in apply_blurpool(small_net(), replace_convs=False)] == ["1.2"]
    assert [change.path for change in apply_blurpool(small_net(), replace_maxpools=False)] == ["3"]
    assert [change.path for change in apply_blurpool(small_net(), min_channels=3)] == ["0", "1.2", "3"]
    assert [change.path for change in apply_blurpool(small_net(), min_channels=17)] == ["1.2"]


def test_a_second_time_changes_nothing() -> None:
    net = small_net()
    apply_blurpool(net)
    layers = list(net.modules())
    assert apply_blurpool(net) == []
    assert list(net.modules()) == layers


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    class OwnConv(nn.Conv2d):
        pass

    normed = parametrizations.weight_norm(nn.Conv2d(16, 16, 3, stride=2))
    assert apply_blurpool(nn.Sequential(OwnConv(16, 16, 3, stride=2), normed)) == []


def test_a_layer_used_twice_stays_one_layer() -> None:
    pool = nn.MaxPool2d(2)
    net = nn.ModuleDict({"a": pool, "b": nn.Sequential(pool)})
    assert [change.path for change in apply_blurpool(net)] == ["a", "b.0"]
    assert net["a"] is net.get_submodule("b.0")


def test_state_dicts_load_both_ways() -> None:
    plain, blurred = small_net(), small_net()
    apply_blurpool(blurred)
    assert list(blurred.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in blurred.named_buffers()] == [name for name, _ in plain.named_buffers()]
    blurred.load_state_dict(plain.state_dict())
    torch.testing.assert_close(blurred.state_dict(), plain.state_dict())
    other = small_net()
    other.load_state_dict(blurred.state_dict())
    torch.testing.assert_close(other.state_dict(), plain.state_dict())


def test_parameters_stay_the_same_objects_so_that_optimizers_stay_valid() -> None:
    torch.manual_seed(0)
    net = small_net()
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    apply_blurpool(net)
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
    first = nn.functional.cross_entropy(net(images), labels)
    torch.autograd.backward(first)
    optimizer.step()
    assert nn.functional.cross_entropy(net(images), labels) < first
    assert not torch.equal(dict(net.named_parameters())["3.weight"], before["3.weight"])


def test_mode_hooks_and_frozen_parameters_are_kept() -> None:
    conv = nn.Conv2d(16, 16, 3, stride=2).eval().requires_grad_(False)
    calls = []
    handle = conv.register_forward_hook(lambda *_: calls.append(1))
    blurred = blurred_conv(conv)
    assert blurred is not None
    blurred(torch.zeros(1, 16, 5, 5))
    assert calls == [1]
    assert not blurred.training
    assert not any(parameter.requires_grad for parameter in blurred.parameters())
    handle.remove()
    blurred(torch.zeros(1, 16, 5, 5))
    assert calls == [1]


def test_no_random_number_is_drawn() -> None:
    net = small_net()
    state = torch.get_rng_state()
    apply_blurpool(net)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", [lambda **options: apply_blurpool(small_net(), **options), BlurPool])
def test_impossible_options_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(OptionError) as error:
        make(replace_convs=False, replace_maxpools=False)
    assert str(error.value) == (
        "blurpool: replace_convs and replace_maxpools are both False. Expected at least one of them to be True. "
        "Leave the plugin out to blur nothing."
    )
    with pytest.raises(OptionError) as error:
        make(min_channels=-1)
    assert str(error.value) == "blurpool.min_channels: got -1. Expected 0 (every convolution) or more."
