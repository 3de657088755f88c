"""The same gradients bit for bit, less kept: against the same models without it."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from kernel_core import TrainableModel, Trainer
from kernel_core.engine import SingleEngine
from kernel_core.errors import ConflictError, OptionError, ParallelismError
from kernel_plugin_activation_checkpointing import (
    ActivationCheckpointing,
    apply_activation_checkpointing,
    select_modules,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Encoder(nn.Module):
    """A model of torch's own layers, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embed(ids))
        return out


class GPT2(nn.Module):
    def __init__(self, dropout: float = 0.1, use_cache: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        special = {"bos_token_id": 1, "eos_token_id": None, "use_cache": use_cache}
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **special))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(ids).logits
        return out


MODELS = {"gpt2": GPT2, "encoder": Encoder}
BLOCKS = {"gpt2": "model.transformer.h.", "encoder": "encoder.layers."}
IDS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))
OPTIONS: list[dict[str, Any]] = [{}, {"every": 2}, {"reentrant": True}, {"offload": True}, {"save": ["mm", "addmm"]}]


def backward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(2)
    loss = model(IDS).square().mean()
    loss.backward()
    after = torch.rand(())  # whoever draws next must draw the same
    return torch.stack([loss.detach(), after]), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: nn.Module) -> int:
    """Return the size of what autograd keeps, parameters and what is kept twice counted once."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(IDS)
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return total


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_the_same_bit_for_bit_dropout_included(name: str, options: dict[str, Any]) -> None:
    plain, changed = MODELS[name](), MODELS[name]()
    paths = apply_activation_checkpointing(changed, **options)
    assert paths == [f"{BLOCKS[name]}{index}" for index in range(0, 3, options.get("every", 1))]
    (loss, gradients), (other_loss, others) = backward(plain), backward(changed)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[key], others[key]) for key in gradients)


@pytest.mark.parametrize("name", MODELS)
def test_much_less_is_kept_and_half_of_it_with_every_second_block(name: str) -> None:
    plain, all_blocks, half = MODELS[name](), MODELS[name](), MODELS[name]()
    apply_activation_checkpointing(all_blocks)
    apply_activation_checkpointing(half, every=2)
    whole, least, some = kept_bytes(plain), kept_bytes(all_blocks), kept_bytes(half)
    assert least < 0.25 * whole
    assert least < some < 0.6 * whole


@pytest.mark.parametrize("name", MODELS)
def test_names_classes_and_state_stay(name: str) -> None:
    plain, changed = MODELS[name](), MODELS[name]()
    apply_activation_checkpointing(changed)
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in changed.named_parameters()]
    assert [type(module) for module in plain.modules()] == [type(module) for module in changed.modules()]


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Encoder()
    apply_activation_checkpointing(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert float(twin(IDS).detach().abs().max()) == 0
    _, gradients = backward(model)
    _, expected = backward(Encoder())
    assert all(torch.equal(gradients[key], expected[key]) for key in expected)
    backward(twin)
    assert all(p.grad is not None and float(p.grad.abs().max()) == 0 for p in twin.encoder.layers[1].parameters())


def test_blocks_run_twice_in_training_and_once_elsewhere() -> None:
    model, runs = Encoder(), []
    for layer in model.encoder.layers:
        layer.linear1.register_forward_hook(lambda *_: runs.append(1))  # type: ignore[union-attr,operator]
    apply_activation_checkpointing(model)
    backward(model)
    assert len(runs) == 6
    runs.clear()
    backward(model.eval())
    assert len(runs) == 3
    runs.clear()
    with torch.no_grad():
        model.train()(IDS)
    assert len(runs) == 3


def test_saved_operators_are_not_run_again() -> None:
    plain, without, saving = Encoder(), Encoder(), Encoder()
    apply_activation_checkpointing(without)
    apply_activation_checkpointing(saving, save=["addmm", "aten::mm"])
    counts = []
    for model in (plain, without, saving):
        with Calls() as calls:
            backward(model)
        counts.append(calls.counts["addmm"])
    assert counts[1] > counts[0]
    assert counts[2] == counts[0]


def test_a_cache_of_keys_is_left_out_in_training_and_kept_elsewhere() -> None:
    plain, changed = GPT2(0.0), GPT2(0.0, use_cache=True)
    apply_activation_checkpointing(changed)
    torch.testing.assert_close(backward(plain)[1], backward(changed)[1])
    changed.eval()
    assert changed.model(IDS).past_key_values.get_seq_length() == 12
    with torch.no_grad():
        generated = changed.model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 14)


def test_a_second_call_replaces_the_first_and_a_forward_of_the_instance_is_kept() -> None:
    model, runs = Encoder(), []
    own = model.encoder.layers[0].forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return own(*args, **kwargs)

    model.encoder.layers[0].forward = counted  # type: ignore[assignment]
    apply_activation_checkpointing(model, reentrant=True)
    apply_activation_checkpointing(model)
    backward(model)
    assert len(runs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"save": ["mm", "addmm"]}], ids=str)
def test_compiles_into_one_graph_with_the_same_gradients(options: dict[str, Any]) -> None:
    plain, changed = GPT2(0.0), GPT2(0.0)
    apply_activation_checkpointing(changed, **options)
    _, expected = backward(plain)
    torch.compile(changed, backend="aot_eager", fullgraph=True)(IDS).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in changed.named_parameters()}
    torch.testing.assert_close({key: gradients[key] for key in expected}, expected)


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


def test_in_training_the_weights_are_the_same_bit_for_bit() -> None:
    models = []
    for parallelism in (None, {"activation_checkpointing": {"every": 2}}):
        model = Net()
        Trainer(
            model=model,
            train_dataloader=[IDS.roll(shift) for shift in range(3)],
            max_duration="3ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            parallelism=parallelism,
            device="cpu",
            progress_bar=False,
            seed=5,
        ).fit()
        models.append(model)
    changed = ["forward" in vars(layer) for layer in models[1].net.encoder.layers]
    assert changed == [True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_the_older_way_is_refused_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^activation_checkpointing\.reentrant: got True with the engine 'fsdp'\. Expected False there"
    monkeypatch.setattr(SingleEngine, "name", "fsdp")
    with pytest.raises(ConflictError, match=message):
        Trainer(
            model=Net(),
            parallelism=[SingleEngine(), ActivationCheckpointing(reentrant=True)],
            device="cpu",
            progress_bar=False,
        )


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()


class Chosen(Marked):
    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)


def test_the_model_may_say_what_to_recompute() -> None:
    model = Marked()
    model.third._activation_checkpointing = True  # type: ignore[assignment]
    assert list(select_modules(model)) == ["third"]
    inside = nn.ModuleDict({"net": Chosen(), "other": nn.Linear(2, 2)})
    assert list(select_modules(inside)) == ["net.first", "net.second"]
    inside["net"].second._activation_checkpointing = False  # type: ignore[union-attr]
    assert list(select_modules(inside)) == ["net.first"]


def test_of_a_transformers_model_its_repeated_layers_are_taken() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=8, **sizes))
    assert list(select_modules(bert)) == ["encoder.layer.0", "encoder.layer.1"]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["TransformerEncoderLayer"], ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]),
        (["encoder.layers.*"], ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]),
        (["**.linear1", "embed"], ["embed", *(f"encoder.layers.{index}.linear1" for index in range(3))]),
        (["encoder", "Linear"], ["encoder"]),  # what is inside is not computed a third time
    ],
)
def test_modules_by_class_and_path(modules: list[str], expected: list[str]) -> None:
    assert list(select_modules(Encoder(), modules)) == expected


def test_nothing_to_recompute_says_what_was_looked_for() -> None:
    message = (
        r"^activation_checkpointing: found nothing to recompute in Marked\. Looked for activation_checkpointing_fn.*"
        r"_no_split_modules, and for an nn\.ModuleList of modules of one class\. Name classes or paths"
    )
    with pytest.raises(ParallelismError, match=message):
        apply_activation_checkpointing(Marked())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"modules": ["Blok"]},
            r"^activation_checkpointing\.modules: 'Blok' is no class and no path of a module in Encoder",
        ),
        (
            {"save": ["mmm"]},
            r"^activation_checkpointing\.save: torch has no operator 'mmm'\. Expected names such as 'mm'",
        ),
        ({"every": 0}, r"^activation_checkpointing\.every: got 0\. Expected at least 1"),
        ({"save": ["mm"], "reentrant": True}, r"^activation_checkpointing\.save: got \['mm'\] together with reentrant"),
        ({"recompute": False}, r"^activation_checkpointing\.recompute: got False, which leaves only offload=True"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ActivationCheckpointing(**options).apply(Encoder(), None)


def test_what_transformers_recomputes_already_is_refused() -> None:
    model = GPT2()
    for block in model.model.transformer.h:
        block.gradient_checkpointing = True
    with pytest.raises(
        ParallelismError, match=r"^activation_checkpointing: transformers recomputes model\.tr.*already"
    ):
        apply_activation_checkpointing(model)
