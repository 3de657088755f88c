"""The recipe, through the kernel."""

import pytest
from kernel_core.recipe import RunData, build_trainer, merge
from kernel_plugin_numbers import digit_strips, recipe

TINY = {
    "model": {"width": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "num_channels": 16},
    "data": {"batch_size": 8, "num_train_strips": 32, "num_test_strips": 16},
    "train": {"max_duration": "3ba", "seed": 7, "device": "cpu"},
}


def test_a_tiny_run_trains_and_reports_every_metric() -> None:
    with build_trainer(merge(recipe.config, TINY), recipe.functions, progress_bar=False) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 3
        values = trainer.state.eval_metric_values
    assert sorted(values) == [
        "digits12/exact_match",
        "digits24/exact_match",
        "digits5/exact_match",
        "digits5/shift_consistency",
    ]
    assert all(0 <= float(value) <= 1 for value in values.values())


def test_training_strips_follow_the_seed_and_test_strips_do_not() -> None:
    one, other = (digit_strips(seed=seed, num_train_strips=64, num_test_strips=8) for seed in (0, 1))
    assert isinstance(one, RunData)
    assert one.train.dataset[0]["pixels"].tobytes() != other.train.dataset[0]["pixels"].tobytes()
    tests = [[item["pixels"].tobytes() for item in run.evaluators[0].data.dataloader.dataset] for run in (one, other)]
    assert tests[0] == tests[1]


def test_evaluators_are_named_for_their_digits_and_the_first_measures_shifts() -> None:
    evaluators = digit_strips(num_test_strips=8, test_digits=(4, 9)).evaluators
    assert [(one.label, one.metric_names) for one in evaluators] == [
        ("digits4", ["exact_match", "shift_consistency"]),
        ("digits9", ["exact_match"]),
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_strips_are_the_same_with_workers(num_workers: int) -> None:
    data = digit_strips(batch_size=4, num_workers=num_workers, num_train_strips=8, num_test_strips=4)
    widths = sorted(int(width) for batch in data.train for width in batch["widths"])
    assert widths == sorted(data.train.dataset[index]["pixels"].shape[1] for index in range(8))
