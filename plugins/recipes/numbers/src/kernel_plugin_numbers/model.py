"""The reader: a convolutional stem, a BERT encoder over the columns, and CTC."""

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from kernel_core import TrainableModel
from kernel_core.errors import DataError
from torch import nn
from torch.nn import functional as F

from kernel_plugin_numbers.data import STRIP_HEIGHT_PX, StripBatch
from kernel_plugin_numbers.reading import BLANK, NUM_DIGITS, greedy_reading

if TYPE_CHECKING:
    from transformers import BertModel

COLUMN_PX = 4  # one column of features per 4 pixels: two strides of 2


class ReaderOutputs(TypedDict, total=False):
    """What the reader makes of a batch.

    Attributes:
        logits: shape (batch, columns, 11): scores of the ten digits and, last, the blank.
        num_columns: shape (batch,), the columns of each strip; what is beyond belongs to the canvas.
        shifted_logits: shape (batch, shifts, columns, 11), where the batch has shifted strips.
    """

    logits: torch.Tensor
    num_columns: torch.Tensor
    shifted_logits: torch.Tensor


class Stem(nn.Module):
    """Turn strips into columns of features: each stride halves height and width, rounding up.

    Args:
        num_channels: channels of the first convolution; the second has twice as many.
        width: features per column.
    """

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.strokes = nn.Conv2d(1, num_channels, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.shapes = nn.Conv2d(num_channels, 2 * num_channels, kernel_size=3, stride=2, padding=1)
        self.columns = nn.Linear(2 * num_channels * (STRIP_HEIGHT_PX // COLUMN_PX), width)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, 12, pixels) to (batch, ceil(pixels / 4), width)."""
        maps = F.relu(self.strokes(pixel_values))
        # On a CPU max pools take a quarter of the time in this layout.
        maps = self.pool(maps.contiguous(memory_format=torch.channels_last))
        maps = F.relu(self.shapes(maps))
        columns: torch.Tensor = self.columns(maps.permute(0, 3, 1, 2).flatten(2))
        return columns


class DigitReader(TrainableModel):
    """Read strips of handwritten digits.

    No layer draws random numbers or keeps batch statistics, so that losses do not depend on how a batch is divided.

    Args:
        width: features per column.
        num_layers: layers of the encoder.
        num_heads: attention heads per layer; divides ``width``.
        intermediate_size: width of the encoder's feed-forward layers.
        num_channels: channels of the stem's first convolution.
        max_columns: the longest strip that the position embeddings know, in columns of 4 pixels.

    Example:
        >>> reader = DigitReader(width=32)
        >>> reader({"pixel_values": torch.zeros(2, 1, 12, 78), "widths": torch.tensor([70, 78])})["logits"].shape
        torch.Size([2, 20, 11])

    Source:
        Shi, Bai and Yao, An End-to-End Trainable Neural Network for Image-Based Sequence Recognition (2015), with an
        encoder as in Devlin et al., BERT (NAACL 2019).
    """

    def __init__(
        self,
        width: int = 96,
        num_layers: int = 2,
        num_heads: int = 4,
        intermediate_size: int = 192,
        num_channels: int = 32,
        max_columns: int = 128,
    ) -> None:
        super().__init__()
        self.stem = Stem(num_channels, width)
        self.encoder = _bert_encoder(width, num_layers, num_heads, intermediate_size, max_columns)
        self.head = nn.Linear(width, NUM_DIGITS + 1)

    def forward(self, batch: StripBatch) -> ReaderOutputs:
        """Score every column of every strip."""
        num_columns = -(-batch["widths"] // COLUMN_PX)
        return ReaderOutputs(logits=self._score(batch["pixel_values"], num_columns), num_columns=num_columns)

    def loss(self, outputs: ReaderOutputs, batch: StripBatch) -> torch.Tensor:
        """Average over strips the negative log-likelihood of the label, per digit.

        Source:
            Graves et al., Connectionist Temporal Classification (ICML 2006).
        """
        # CTC wants (columns, batch, classes), and reads the lengths on the host: one device sync.
        log_probs = outputs["logits"].float().log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["labels"], outputs["num_columns"], batch["label_lengths"], blank=BLANK)

    def eval_forward(self, batch: StripBatch, outputs: ReaderOutputs | None = None) -> ReaderOutputs:
        """Score the strips, and their shifted copies where the batch has them."""
        outputs = self(batch) if outputs is None else outputs
        shifted = batch.get("shifted_pixel_values")
        if shifted is None:
            return outputs
        num_columns = outputs["num_columns"].repeat_interleave(shifted.shape[1])
        logits = self._score(shifted.flatten(0, 1), num_columns)
        return ReaderOutputs(**outputs, shifted_logits=logits.reshape(*shifted.shape[:2], *logits.shape[1:]))

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Make ``exact_match``, and for evaluation ``shift_consistency``."""
        from kernel_plugin_numbers.metrics import ExactMatch, ShiftConsistency

        metrics: dict[str, Any] = {"exact_match": ExactMatch()}
        return metrics if is_train else metrics | {"shift_consistency": ShiftConsistency()}

    def update_metric(self, batch: StripBatch, outputs: ReaderOutputs, metric: Any) -> None:
        """Give a metric the readings and what they are compared with: the labels, or the readings of shifted strips.

        Raises:
            DataError: shift consistency is asked for and the batch has no shifted strips.
        """
        from kernel_plugin_numbers.metrics import ShiftConsistency

        readings = greedy_reading(outputs["logits"], outputs["num_columns"])
        if not isinstance(metric, ShiftConsistency):
            metric.update(readings, batch["labels"])
        elif "shifted_logits" in outputs:
            metric.update(readings, greedy_reading(outputs["shifted_logits"], outputs["num_columns"][:, None]))
        else:
            raise DataError(
                "numbers: shift_consistency needs shifted strips and the batch has no 'shifted_pixel_values'. Collate with "
                "StripCollator(width_px, with_shifts=True), or evaluate with metric_names=['exact_match']."
            )

    def _score(self, pixel_values: torch.Tensor, num_columns: torch.Tensor) -> torch.Tensor:
        columns = self.stem(pixel_values)
        inside = torch.arange(columns.shape[1], device=columns.device) < num_columns[:, None]
        encoded = self.encoder(inputs_embeds=columns, attention_mask=inside.long()).last_hidden_state
        scores: torch.Tensor = self.head(encoded)
        return scores


def _bert_encoder(width: int, num_layers: int, num_heads: int, intermediate_size: int, max_columns: int) -> "BertModel":
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1,
        type_vocab_size=1,
        pad_token_id=0,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_columns,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    encoder = BertModel(config, add_pooling_layer=False)
    # Columns take the place of words: the table would never get a gradient, which DDP refuses.
    encoder.embeddings.word_embeddings.requires_grad_(False)
    return encoder
