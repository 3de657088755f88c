"""Fine-tune a BERT classifier: which part of Python's standard library does a sentence of documentation come from?"""

import ast
import sysconfig
from pathlib import Path

import torch
import transformers
from kernel_core import Trainer
from kernel_core.optim import DecoupledAdamW, LinearWithWarmupScheduler
from kernel_plugin_early_stopper import EarlyStopper
from kernel_plugin_file_logger import FileLogger
from kernel_plugin_gradient_clipping import GradientClipping
from kernel_plugin_huggingface import CrossEntropy, HuggingFaceModel
from kernel_plugin_in_memory_logger import InMemoryLogger
from kernel_plugin_lr_monitor import LRMonitor
from kernel_plugin_memory_monitor import MemoryMonitor
from kernel_plugin_speed_monitor import SpeedMonitor
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader, random_split
from torchmetrics.classification import MulticlassAccuracy

PARTS = ["asyncio/*.py", "email/*.py", "unittest/*.py", "_pydecimal.py"]


def load_sentences():
    sentences, labels = [], []
    for label, part in enumerate(PARTS):
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob(part)):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found = (ast.get_docstring(node) or "").replace("\n", " ").split(". ")
                    sentences += (found := [text for text in found if len(text.split()) > 4])
                    labels += [label] * len(found)
    return sentences, labels


def load_model_and_tokenizer(texts):
    # From the hub:
    #   tokenizer = transformers.AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
    #   model = transformers.AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-uncased", num_labels=4)
    # Here a small one is built on the spot, so that nothing is downloaded.
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=4000, special_tokens=[*special.values()]))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=4, initializer_range=0.08, **sizes)
    model = transformers.BertForSequenceClassification(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.data *= 0.005  # not trained before: a learning rate for fine-tuning moves only small ones
    return model, tokenizer


torch.manual_seed(42)
sentences, labels = load_sentences()
hf_model, tokenizer = load_model_and_tokenizer(sentences)
encoded = tokenizer(sentences, padding="max_length", truncation=True, max_length=24, return_token_type_ids=False)
dataset = [{"labels": label, **{key: encoded[key][row] for key in encoded}} for row, label in enumerate(labels)]
train_dataset, eval_dataset = random_split(dataset, [0.85, 0.15])
collate = transformers.default_data_collator

metrics = [CrossEntropy(), MulticlassAccuracy(num_classes=len(PARTS), average="micro")]
model = HuggingFaceModel(hf_model, tokenizer=tokenizer, metrics=metrics, use_logits=True)
early_stopper = EarlyStopper(monitor="metrics/train/CrossEntropy", patience="2ep")
in_memory_logger = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_dataset, batch_size=64, shuffle=True, collate_fn=collate),
    eval_dataloader=DataLoader(eval_dataset, batch_size=64, collate_fn=collate),
    optimizers=DecoupledAdamW(model.parameters(), lr=2e-5, weight_decay=0.01),
    schedulers=LinearWithWarmupScheduler(t_warmup="0.06dur", alpha_f=0.0),
    max_duration="3ep",
    device_train_microbatch_size=32,
    precision="amp_bf16",
    algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
    callbacks=[SpeedMonitor(window_size=50), LRMonitor(), MemoryMonitor(), early_stopper],
    loggers=[FileLogger(filename="training_log.txt", flush_interval=50), in_memory_logger],
    seed=42,
    progress_bar=True,
)
trainer.eval()
before = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
trainer.fit()
after = trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()
loss = in_memory_logger.get_timeseries("loss/train/total")["loss/train/total"]
print(f"loss: {loss[0]:.2f} at first, {loss[-1]:.2f} at last")
print(f"accuracy: {before:.2f} before, {after:.2f} after")
