"""The recipe, through the kernel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_core import Trainer
from kernel_core.recipe import build_trainer, merge
from kernel_plugin_stdlib import byte_gpt2, read_corpus, recipe, stdlib_bytes

MODEL = {"width": 32, "num_layers": 1, "num_heads": 2}
DATA = {"batch_size": 16, "length": 32, "eval_lengths": [32, 128], "max_bytes": 50_000, "eval_bytes": 4096}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(duration: str = "3ba", **sections: Any) -> dict[str, Any]:
    document = {"model": MODEL, "data": DATA, "train": {"max_duration": duration, "seed": 7, "device": "cpu"}}
    return merge(merge(recipe.config, document), sections)


def windows(evaluator: Any) -> torch.Tensor:
    return torch.cat([batch["input_ids"] for batch in evaluator.data.dataloader])


def test_a_tiny_run_reports_bits_per_byte_at_both_lengths() -> None:
    with build_trainer(tiny(), recipe.functions, progress_bar=False) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 3
        assert trainer.state.timestamp.token == 3 * 16 * 32
        values = trainer.state.eval_metric_values
    assert sorted(values) == ["ctx128/bits_per_byte", "ctx32/bits_per_byte"]
    assert all(4 < float(value) < 9 for value in values.values())


def test_a_short_training_lowers_bits_per_byte_on_files_never_seen() -> None:
    torch.manual_seed(0)
    data = stdlib_bytes(**{**DATA, "eval_lengths": (32,)})
    with Trainer(
        model=byte_gpt2(**MODEL),
        train_dataloader=data.train,
        eval_dataloader=list(data.evaluators),
        optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_duration="60ba",
        seed=1,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        before = float(trainer.eval()["ctx32/bits_per_byte"])
        trainer.fit()
        after = float(trainer.state.eval_metric_values["ctx32/bits_per_byte"])
    assert before == pytest.approx(8, abs=0.3)
    assert after < 5


def test_the_split_into_microbatches_does_not_matter() -> None:
    losses = []
    for size in (None, 5):
        document = tiny(train={"device_train_microbatch_size": size})
        with build_trainer(document, recipe.functions, progress_bar=False) as trainer:
            losses.append([float(trainer.state.loss) for _ in trainer.steps()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_windows_come_in_the_order_of_the_seed() -> None:
    one, again, other = (next(iter(stdlib_bytes(**DATA, seed=seed).train))["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_every_training_window_comes_once_per_epoch() -> None:
    data = stdlib_bytes(**{**DATA, "max_bytes": 32 * 64})
    seen = torch.cat([batch["input_ids"] for batch in data.train])
    expected = read_corpus("train", 32 * 64).long().view(64, 32)
    assert sorted(seen.tolist()) == sorted(expected.tolist())


def test_evaluators_read_the_same_held_out_bytes_whatever_the_seed() -> None:
    short, long = stdlib_bytes(**DATA).evaluators
    other_short, _ = stdlib_bytes(**DATA, seed=5).evaluators
    assert (short.label, long.label) == ("ctx32", "ctx128")
    assert short.metric_names is long.metric_names is None  # those of whatever model is trained
    assert windows(long).shape == (32, 128)
    assert torch.equal(windows(short), windows(long).view(128, 32))
    assert torch.equal(windows(short), windows(other_short))
    heldout = bytes(read_corpus("heldout").tolist())
    assert all(bytes(window) in heldout for window in windows(long).tolist())


def test_test_batches_have_as_many_bytes_as_training_batches() -> None:
    data = stdlib_bytes(**DATA)
    assert [next(iter(one.data.dataloader))["input_ids"].shape for one in data.evaluators] == [(16, 32), (4, 128)]


def test_by_default_it_trains_at_128_and_is_tested_at_128_and_512() -> None:
    data = stdlib_bytes()
    assert next(iter(data.train))["input_ids"].shape[1] == 128
    assert [(one.label, windows(one).shape[1]) for one in data.evaluators] == [("ctx128", 128), ("ctx512", 512)]
    assert byte_gpt2(**MODEL).gpt2.config.n_positions == 512


def test_alibi_changes_the_model_and_lifts_the_limit_on_windows() -> None:
    pytest.importorskip("kernel_plugin_alibi")
    document = tiny(plugins=["alibi"], data={"eval_lengths": [32, 1024]})
    with build_trainer(document, recipe.functions, progress_bar=False) as trainer:
        assert [(one.plugin, one.path) for one in trainer.surgery_report.changes] == [
            ("alibi", "gpt2.transformer.wpe"),
            ("alibi", "gpt2.transformer"),
        ]
        lengths = []
        trainer.state.model.register_forward_pre_hook(lambda module, args: lengths.append(args[0]["input_ids"].shape))
        trainer.fit()
        values = trainer.state.eval_metric_values
    # The plugin's default cuts rows of 32 into four of 8.
    assert lengths[:3] == [(64, 8)] * 3
    assert lengths[-1][1] == 1024
    assert all(4 < float(value) < 9 for value in values.values())
