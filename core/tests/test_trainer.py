"""Start-up, failure and closing, and wrong use with one clear message."""

from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, Evaluator, LoggerDestination, TrainableModel, Trainer, hookimpl
from kernel_core.errors import (
    ConflictError,
    DataError,
    OptimizerError,
    OptionError,
    ParallelismError,
    PluginLoadError,
    PluginNotFoundError,
    TrainerError,
)
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


DATA = [torch.ones(4, 2)] * 3


def make(*plugins: Any, **kwargs: Any) -> Trainer:
    model = Line()
    options: dict[str, Any] = {
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_dataloader": DATA,
        "max_duration": "1ep",
        "device": "cpu",
        "plugins": list(plugins),
        "progress_bar": False,
    }
    return Trainer(**(options | kwargs))


def test_start_up_has_the_order_of_the_design() -> None:
    log: list[str] = []

    class Everything(Algorithm):
        @hookimpl
        def init(self) -> None:
            log.append("init")

        @hookimpl
        def transform_model(self, model: Any, report: Any) -> None:
            log.append("surgery")
            report.record("line", "", "", "looked at")

        @hookimpl
        def model_transformed(self, report: Any) -> None:
            log.append(f"model_transformed, {len(report.changes)} change")

        @hookimpl
        def wrap_optimizer(self) -> None:
            log.append("wrap_optimizer")

        @hookimpl
        def before_load(self) -> None:
            log.append("before_load")

        @hookimpl
        def after_load(self) -> None:
            log.append("after_load")

        def check(self, state: Any) -> None:
            log.append(f"check under {state.engine.name}")

    make(Everything())
    assert log == [
        "check under single",
        "init",
        "surgery",
        "model_transformed, 1 change",
        "wrap_optimizer",
        "before_load",
        "after_load",
    ]


def test_a_plugin_that_cannot_work_is_refused_before_anything_starts() -> None:
    class Picky(Algorithm):
        def check(self, state: Any) -> None:
            raise ConflictError(f"picky: cannot work under the engine {state.engine.name}. Use another.")

        @hookimpl
        def init(self) -> None:
            raise AssertionError("started")

    with pytest.raises(ConflictError, match="picky: cannot work under the engine single"):
        make(Picky())


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"model": nn.Linear(1, 1)}, TrainerError, r"model: got a Linear\. Expected a TrainableModel"),
        ({"device_train_microbatch_size": 0}, TrainerError, r"device_train_microbatch_size: got 0\. Expected a whole"),
        ({"iteration_length": -1}, TrainerError, r"iteration_length: got -1"),
        ({"max_duration": "0.5dur"}, TrainerError, r"max_duration: got 0\.5dur\. A share of the run cannot say"),
        ({"device": "cuda"}, TrainerError, r"device: 'cuda' was asked for, and this machine has no accelerator"),
        ({"device": "gpu:1"}, TrainerError, r"device: 'gpu:1' was asked for"),
        ({"device": "cup"}, TrainerError, r"device: unknown device 'cup'\. Did you mean 'cpu'"),
        (
            {"parallelism": "sinlge"},
            PluginNotFoundError,
            r"sinlge: no parallelism of that name.* Did you mean 'single'",
        ),
        (
            {"parallelism": {"single": {}, "ddp": {}}},
            ParallelismError,
            r"parallelism: got the engines single and ddp\. Expected one",
        ),
        ({"train_dataloader": 3}, DataError, r"dataloader: got 3, which is not iterable"),
        (
            {"train_dataloader": {"data": 3}},
            DataError,
            r"got a dict with \['data'\]\. Expected the arguments of DataSpec",
        ),
        ({"eval_dataloader": [Evaluator("a", DATA), DATA]}, TrainerError, r"got Evaluators and other things"),
        ({"eval_dataloader": [Evaluator("a", DATA)] * 2}, TrainerError, r"two evaluators have the label 'a'"),
        ({"plugins": ["alibbbi"]}, PluginNotFoundError, r"alibbbi: no algorithm or callback or logger"),
        ({"plugins": 3}, PluginLoadError, r"plugins: got 3\. Expected a name"),
        ({"callbacks": Callback}, PluginLoadError, r"Make an instance: Callback\(\.\.\.\)"),
        (
            {"plugins": {"gradient_clipping": 3}},
            OptionError,
            r"gradient_clipping: got 3\. Expected its options as a mapping",
        ),
        ({"seed": "3"}, TrainerError, r"seed: got '3'\. Expected a whole number"),
        ({"run_name": "../x"}, TrainerError, r"run_name: got '\.\./x'"),
        ({"max_duration": "-1ep"}, TrainerError, r"max_duration: got -1ep\. Expected a time of at least 0"),
        ({"max_duration": "1iter"}, TrainerError, r"max_duration: 1iter counts iterations"),
        ({"optimizers": "adamw"}, OptimizerError, r"optimizers: got 'adamw'\. Expected a torch\.optim\.Optimizer"),
        ({"schedulers": "cosine"}, TrainerError, r"schedulers: got 'cosine'\. Expected one of torch's"),
        (
            {"eval_dataloader": Evaluator("a", DATA, metric_names=["x"])},
            TrainerError,
            r"no metric of the model matches 'x'",
        ),
        ({"plugins": [3]}, PluginLoadError, r"plugins: got 3\. Expected a name"),
    ],
)
def test_wrong_use_is_one_clear_error(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    if str(kwargs.get("device", "")).startswith(("cuda", "gpu")) and torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(error, match=message):
        make(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"train_dataloader": None}, "fit: no train_dataloader"),
        ({"optimizers": None}, "fit: no optimizer"),
        ({"max_duration": None}, "fit: no max_duration"),
    ],
)
def test_fit_says_what_is_missing(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make(**kwargs).fit()


def test_a_plugin_of_the_wrong_kind_is_refused() -> None:
    class Watch(Callback):
        pass

    with pytest.raises(PluginLoadError, match=r"algorithms: watch is one of the callbacks"):
        make(algorithms=Watch())


def test_an_endless_evaluator_needs_a_limit() -> None:
    endless = Evaluator("endless", iter(DATA))
    with pytest.raises(DataError, match=r"evaluator endless: its loader has no length"):
        make(eval_dataloader=endless).fit()


def test_evaluators_check_their_label_and_patterns() -> None:
    with pytest.raises(TrainerError, match="got the label 'a/b'"):
        Evaluator("a/b", DATA)
    with pytest.raises(TrainerError, match=r"evaluator a: 'x\(' is no regular expression"):
        Evaluator("a", DATA, metric_names=["x("])


def test_a_scheduler_that_needs_a_value_is_refused_at_start() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TrainerError, match=r"ReduceLROnPlateau\.step needs 'metrics'"):
        make(model=model, optimizers=optimizer, schedulers=plateau)


def test_options_by_name_may_be_a_mapping() -> None:
    trainer = make(plugins={"gradient_clipping": {"clipping_threshold": 0.01}})
    assert trainer.plan.plugins[0].plugin.clipping_threshold == 0.01  # type: ignore[attr-defined]


def test_a_forgotten_argument_does_not_end_the_trainer() -> None:
    trainer = make(train_dataloader=None)
    with pytest.raises(TrainerError, match="no train_dataloader"):
        trainer.fit()
    trainer.fit(DATA)
    assert trainer.state.timestamp.batch == 3
    trainer.close()
    with pytest.raises(TrainerError, match="eval: this trainer is closed"):
        trainer.eval(DATA)


def test_only_plugins_that_began_are_closed_and_fit_failed_waits_for_fit() -> None:
    witness = Witness()

    class Refusing(Callback):
        def check(self, state: Any) -> None:
            raise ConflictError("refusing: not here.")

    with pytest.raises(ConflictError) as caught:
        make(witness, Refusing())
    assert witness.seen == []
    assert "method check" in caught.value.__notes__[0]

    class FailsInit(Callback):
        @hookimpl
        def init(self) -> None:
            raise KeyError("planted")

    with pytest.raises(KeyError):
        make(FailsInit(), witness)
    assert witness.seen == []


def test_batches_that_are_handed_out_again_are_not_changed() -> None:
    seen = []

    class Doubling(Algorithm):
        @hookimpl
        def before_forward(self, state: Any) -> None:
            state.batch_set_item("x", state.batch_get_item("x") * 2)
            seen.append(float(state.batch["x"][0, 0]))

    class OfDict(Line):
        def forward(self, batch: Any) -> Any:
            return self.line(batch["x"])

    model = OfDict()
    make(
        Doubling(),
        model=model,
        optimizers=lambda p: torch.optim.SGD(p, lr=0.1),
        train_dataloader=[{"x": torch.ones(2, 2)}],
        max_duration="3ep",
    ).fit()
    assert seen == [2.0, 2.0, 2.0]


def test_another_loader_starts_at_its_first_batch() -> None:
    seen = []

    class Watch(Callback):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            seen.append(float(state.batch[0, 0]))

    trainer = make(Watch(), max_duration="2ba")
    trainer.fit()
    trainer.fit([torch.full((1, 2), float(n)) for n in (5, 6, 7)], duration="1ep")
    assert seen == [1.0, 1.0, 5.0, 6.0, 7.0]


def test_tokens_that_never_come_are_an_error_and_not_an_endless_run() -> None:
    with pytest.raises(DataError, match="or a schedule counts tokens, and the batch has none"):
        make(max_duration="9tok").fit()


def test_a_plugin_that_leaves_no_row_is_told_so() -> None:
    class Nothing(Algorithm):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            state.batch = state.batch[:0]

    with pytest.raises(DataError, match="no row is left to train on"):
        make(Nothing(), device_train_microbatch_size=2).fit()


def test_a_logger_s_hooks_have_the_same_patience(caplog: pytest.LogCaptureFixture) -> None:
    class Remote(LoggerDestination):
        @hookimpl
        def batch_end(self) -> None:
            raise ConnectionError("no route")

    trainer = make(Remote(), max_duration="2ep")
    trainer.fit()
    assert trainer.state.timestamp.batch == 6
    assert "switched off" in caplog.text


class Failing(Callback):
    def __init__(self, at: str = "batch_end") -> None:
        self.at = at

    @hookimpl
    def batch_end(self, state: Any) -> None:
        if self.at == "batch_end" and state.progress.batch == 2:
            raise ZeroDivisionError("planted")

    @hookimpl
    def close(self) -> None:
        if self.at == "close":
            raise OSError("cannot close")


class Witness(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def fit_failed(self, error: BaseException) -> None:
        self.seen.append(f"failed with {type(error).__name__}")

    @hookimpl
    def close(self) -> None:
        self.seen.append("closed")


def test_an_exception_names_plugin_hook_rank_and_time_and_everybody_closes() -> None:
    witness = Witness()
    trainer = make(Failing(), witness)
    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        trainer.fit()
    assert caught.value.__notes__ == [
        "in plugin 'failing' (of no distribution), hook batch_end, rank 0, epoch 0, batch 2"
    ]
    assert witness.seen == ["failed with ZeroDivisionError", "closed"]
    trainer.close()
    assert witness.seen.count("closed") == 1
    with pytest.raises(TrainerError, match="this trainer is closed"):
        trainer.fit()


def test_an_exception_of_the_model_says_how_far_the_run_was() -> None:
    class Broken(Line):
        def loss(self, outputs: Any, batch: Any) -> Any:
            raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss today") as caught:
        make(model=Broken(), optimizers=lambda p: torch.optim.SGD(p, lr=0.1), run_name="brave-run").fit()
    assert caught.value.__notes__ == ["the run 'brave-run' failed at rank 0, epoch 0, batch 0"]


def test_every_plugin_closes_whatever_another_raises() -> None:
    witness = Witness()
    trainer = make(Failing("close", id="a"), Failing("close", id="b"), witness)
    with pytest.raises(ExceptionGroup, match="closing the trainer failed") as caught:
        trainer.close()
    assert [str(error) for error in caught.value.exceptions] == ["cannot close", "cannot close"]
    assert "in plugin 'a'" in caught.value.exceptions[0].__notes__[0]
    assert witness.seen == ["closed"]


def test_a_failure_and_a_failing_close_come_out_together() -> None:
    class Both(Failing):
        @hookimpl
        def close(self) -> None:
            raise OSError("cannot close either")

    with pytest.raises(BaseExceptionGroup) as caught:
        make(Both()).fit()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError, OSError]


def test_leaving_the_context_closes_and_keeps_the_error() -> None:
    witness = Witness()
    with make(witness) as trainer:
        trainer.fit()
    assert witness.seen == ["closed"]
    with pytest.raises(KeyError) as caught:
        with make(Failing("close")):
            raise KeyError("of the user")
    assert caught.value.__notes__ == ["closing the trainer failed too: OSError: cannot close"]


def test_leaving_a_step_iterator_is_no_failure() -> None:
    witness = Witness()
    trainer = make(witness)
    steps = trainer.steps()
    next(steps)
    steps.close()
    assert witness.seen == []
    trainer.fit()
    assert trainer.state.timestamp.batch == 3


class Unreliable(LoggerDestination):
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError("no route")


def test_a_logger_that_keeps_failing_is_switched_off_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    hopeless, recovers = Unreliable(99, id="hopeless"), Unreliable(2, id="recovers")  # type: ignore[call-arg]
    trainer = make(hopeless, recovers, max_duration="4ep")
    trainer.fit()
    assert trainer.state.timestamp.batch == 12
    assert hopeless.calls == 3
    assert recovers.calls == 12
    assert "switched off for the rest of the run" in caplog.text


def test_nothing_is_logged_unless_somebody_listens_and_steps_count_batches() -> None:
    class Keep(LoggerDestination):
        def __init__(self) -> None:
            self.records: list[tuple[int, dict[str, Any]]] = []
            self.settings: dict[str, Any] = {}

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.records.append((step, dict(metrics)))

        def log_hyperparameters(self, hyperparameters: Any) -> None:
            self.settings |= hyperparameters

    assert not make().logger.listening
    keep = Keep()
    trainer = make(keep, seed=7, run_name="kept")
    trainer.fit()
    assert [step for step, _ in keep.records] == [1, 2, 3]
    assert keep.records[2][1]["time/sample"] == 12
    assert isinstance(keep.records[0][1]["loss/train/total"], torch.Tensor)  # read later, not in the step
    assert (keep.settings["seed"], keep.settings["run_name"]) == (7, "kept")


def test_run_names_are_fresh_unless_given() -> None:
    names = {make().state.run_name for _ in range(5)}
    assert len(names) == 5


# --- keyed randomness -----------------------------------------------------------------------------------------------


class Draws(Algorithm):
    def __init__(self, scope: str = "batch") -> None:
        self.scope = scope
        self.drawn: list[float] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self.drawn.append(float(torch.rand((), generator=state.generator(self, self.scope))))


def drawn(*plugins: Any, **kwargs: Any) -> list[float]:
    make(*plugins, **{"seed": 1, **kwargs}).fit()
    return [value for plugin in plugins if isinstance(plugin, Draws) for value in plugin.drawn]


def test_streams_depend_on_seed_plugin_batch_and_on_nothing_else() -> None:
    alone = drawn(Draws())
    assert len(set(alone)) == 3
    assert drawn(Draws()) == alone
    assert drawn(Draws(), Witness(), model=Line(), optimizers=lambda p: torch.optim.Adam(p)) == alone
    assert drawn(Draws(), seed=2) != alone
    assert drawn(Draws(id="other")) != alone  # type: ignore[call-arg]
    both = drawn(Draws(id="other"), Draws())  # type: ignore[call-arg]
    assert both[3:] == alone


def test_a_scope_adds_what_it_names() -> None:
    per_batch = drawn(Draws("batch"), device_train_microbatch_size=2)
    assert per_batch[0::2] == per_batch[1::2]
    per_microbatch = drawn(Draws("microbatch"), device_train_microbatch_size=2)
    assert len(set(per_microbatch)) == 6


def test_drawing_shifts_no_global_generator() -> None:
    make(Draws(), seed=1).fit()
    one = torch.rand(2)
    make(seed=1).fit()
    assert torch.equal(torch.rand(2), one)


def test_neither_evaluation_nor_a_plugin_that_draws_at_start_shifts_training() -> None:
    class Greedy(Callback):
        @hookimpl
        def init(self) -> None:
            torch.rand(99)

        @hookimpl
        def eval_batch_start(self) -> None:
            torch.rand(99)

    def order(*plugins: Any, **kwargs: Any) -> list[float]:
        seen: list[float] = []

        class Watch(Callback):
            @hookimpl
            def batch_start(self, state: Any) -> None:
                seen.append(float(state.batch[0, 0]))

        rows = torch.arange(16.0).reshape(8, 2)
        shuffled = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        make(Watch(), *plugins, train_dataloader=shuffled, max_duration="3ep", seed=4, **kwargs).fit()
        return seen

    alone = order()
    assert order(Greedy()) == alone
    assert order(Greedy(), eval_dataloader=torch.utils.data.DataLoader(DATA, batch_size=None, shuffle=True)) == alone


def test_sample_streams_follow_the_sample_and_scopes_are_checked() -> None:
    draws = Draws()
    state = make(draws, seed=1).state

    def value(**key: Any) -> float:
        return float(torch.rand((), generator=state.generator(draws, "sample", **key)))

    first = value(sample=17)
    state.progress.batch += 5
    assert value(sample=17) == first
    assert value(sample=18) != first
    assert value(sample=17, key="crop") != first
    with pytest.raises(ValueError, match="needs sample="):
        state.generator(draws, "sample")
    with pytest.raises(ValueError, match=r"unknown scope 'node'"):
        state.generator(draws, "node")  # type: ignore[arg-type]


class Narrow(Callback):
    unsupported = {"single": "it needs several", "microbatching": "it counts batches", "resume": "it forgets"}


@pytest.mark.parametrize(
    ("word", "arguments", "what"),
    [
        ("single", {}, "the engine single: it needs several"),
        ("microbatching", {"device_train_microbatch_size": 2}, "batches that are split: it counts batches"),
        ("microbatching", {"device_train_microbatch_size": "auto"}, "batches that are split: it counts batches"),
        ("microbatching", {"grad_accum": 2}, "batches that are split: it counts batches"),
    ],
)
def test_what_a_plugin_says_it_does_not_support_is_refused(word: str, arguments: Any, what: str) -> None:
    plugin = Narrow()
    plugin.unsupported = {word: Narrow.unsupported[word]}
    with pytest.raises(ConflictError, match=rf"narrow: does not work with {what}\. Leave one of them out\."):
        make(plugin, **arguments).fit()


def test_a_plugin_that_cannot_be_resumed_is_refused_before_any_weight_is_loaded(tmp_path: Any) -> None:
    plugin = Narrow()
    plugin.unsupported = {}
    with make(plugin, seed=1) as trainer:
        trainer.fit()
        url = trainer.save_checkpoint(tmp_path, "one")
    plugin.unsupported = {"resume": "it forgets"}
    with pytest.raises(ConflictError, match=r"narrow: does not work with a run that is resumed: it forgets\."):
        make(plugin, load_path=url)
    make(plugin, load_path=url, load_weights_only=True).close()
