"""The recipe: which model, data and settings, and why these."""

from collections.abc import Sequence

from kernel_core import Evaluator
from kernel_core.recipe import Recipe, RunData
from torch.utils.data import DataLoader

from kernel_plugin_numbers.data import DigitStrips, Strip, StripCollator, canvas_width
from kernel_plugin_numbers.model import DigitReader

TRAIN_DIGITS = (3, 6)
# The same test strips for every run, whatever its seed, so that figures of different runs compare.
TEST_SEED = 5


def digit_reader(
    width: int = 96, num_layers: int = 2, num_heads: int = 4, intermediate_size: int = 192, num_channels: int = 32
) -> DigitReader:
    """Make the model of the recipe.

    Args:
        width: features per column.
        num_layers: layers of the encoder.
        num_heads: attention heads per layer; divides ``width``.
        intermediate_size: width of the encoder's feed-forward layers.
        num_channels: channels of the stem's first convolution.
    """
    return DigitReader(width, num_layers, num_heads, intermediate_size, num_channels)


def digit_strips(
    batch_size: int = 64,
    seed: int = 0,
    num_workers: int = 0,
    num_train_strips: int = 12_800,
    num_test_strips: int = 1000,
    test_digits: Sequence[int] = (5, 12, 24),
) -> RunData:
    """Make the strips of the recipe: short ones to train on, short and long ones of other images to test with.

    Args:
        batch_size: strips per batch and rank.
        seed: decides the training strips; the test strips are always the same.
        num_workers: processes that compose training strips; 0 composes them in the main process.
        num_train_strips: strips per epoch, of 3 to 6 digits.
        num_test_strips: strips per evaluator.
        test_digits: digits per test strip, an evaluator ``digits<n>`` for each; the first one also measures shifts.
    """
    train = DataLoader(
        DigitStrips("train", num_train_strips, TRAIN_DIGITS, seed),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        collate_fn=StripCollator(canvas_width(TRAIN_DIGITS[1])),
    )
    evaluators = [
        _evaluator(num_digits, num_test_strips, batch_size, with_shifts=num_digits == test_digits[0])
        for num_digits in test_digits
    ]
    return RunData(train=train, evaluators=evaluators)


def _evaluator(num_digits: int, num_strips: int, batch_size: int, with_shifts: bool) -> Evaluator:
    loader: DataLoader[Strip] = DataLoader(
        DigitStrips("test", num_strips, (num_digits, num_digits), TEST_SEED),
        batch_size,
        collate_fn=StripCollator(canvas_width(num_digits), with_shifts),
    )
    metric_names = ["exact_match", "shift_consistency"] if with_shifts else ["exact_match"]
    return Evaluator(f"digits{num_digits}", loader, metric_names=metric_names)


recipe = Recipe(
    summary="Read strips of handwritten digits: convolutions, a BERT encoder, CTC; about a minute on a CPU.",
    config={
        "model": {"name": "digit_reader"},
        "data": {"name": "digit_strips"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.01},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.1dur"},
        "train": {"max_duration": "600ba"},
        "eval": {"interval": "1dur"},
    },
    functions={"digit_reader": digit_reader, "digit_strips": digit_strips},
)
