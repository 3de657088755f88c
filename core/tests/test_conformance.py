"""The conformance kit finds what is broken on purpose, each by the check that is meant for it, and by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_core.testing.conformance.checks import CHECKS
from kernel_core.testing.conformance.kit import Kit
from kernel_core.testing.conformance.subject import Subject

FAULTY = Path(__file__).parent / "faulty"
# the plugin, the check that finds it, and what it says
FAULTS = [
    ("import_cuda.py", "import", "it calls torch.cuda.device_count"),
    ("import_environment.py", "import", "the environment variable SOME_SWITCH is new"),
    ("import_warnings.py", "import", "the warning filters is another"),
    ("import_slow.py", "import", "s of processor time. Expected 0.5 s at most"),
    ("import_seed.py", "import", "the state of torch's generator is another"),
    ("TakesAnything", "options", "takes **others: Any, so that no option can be checked"),
    ("UndescribedOption", "options", "its option secret is not described in the docstring of UndescribedOption"),
    ("UnknownHook", "hooks", "batch_ended"),
    (
        "UnknownWord",
        "hooks",
        "it says that it does not support 'fdsp'. Expected microbatching, resume, or the name of an engine",
    ),
    ("WrongOrder", "order", "beside gradient_clipping: "),
    ("UnknownRole", "order", "its role 'makes-coffee' is not documented"),
    ("FailsInSilence", "models", "mlp: fails: KeyError: 'inputs'"),
    ("IsNotNeutral", "neutral", "{'factor': 1.0}, and training differs from that without it"),
    ("WatcherThatMeddles", "neutral", "it says that it watches only, and training differs"),
    ("IsNeverTheSame", "deterministic", "two runs with one seed differ"),
    ("DrawsFromTorch", "randomness", "after_train_batch draws from torch's global generator"),
    ("DrawsFromPython", "randomness", "epoch_end draws from Python's random global generator"),
    ("MeddlesInEvaluations", "evaluation", "without evaluations training differs"),
    ("BeginsAnewInEachFit", "fits", "when fit is called twice training differs"),
    ("CommitsTooEarly", "retry", "after a batch was tried again training differs"),
    ("DependsOnTheSplit", "microbatches", "with microbatches a weight differs by"),
    ("LoadsHalfItsState", "state", "after loading it keeps something else than was saved"),
    ("ForgetsItsState", "resume", "resumed after batch 1 of 6 training differs"),
    ("PartsWhatIsShared", "surgery", "lm_head"),
    ("ChangesWithoutAWord", "surgery", "it changes the model without a word"),
    ("CannotBeExported", "export", "torch.export fails on the changed model"),
    ("DrawsOnOneRank", "ddp", "on rank 1 batch_end draws from torch's global generator"),
    ("RanksDiverge", "ddp", "the ranks end with different weights"),
    ("CollectiveOnOneRank", "ddp", "different collectives: rank 0 nothing, rank 1 batch_end: all_reduce [[1]]"),
    ("DifferentCollectives", "ddp", "rank 0 epoch_end: all_reduce [[1]], rank 1 epoch_end: all_reduce [[2]]"),
    ("EachRankForItself", "ddp", "resumed after batch 4 of 6 rank 1 differs: plugin/each_rank_for_itself/seen"),
    ("LooksAtItsPartOnly", "fsdp", "on two ranks a weight differs by"),
    ("PatchesTorch", "teardown", "the function torch.nn.functional.relu is another"),
    ("LeavesAHook", "teardown", "of the module (root) is new"),
    ("LeavesAWrapper", "teardown", "a function forward put on the module (root) is new"),
    ("LeavesAThread", "teardown", "the thread left over is new"),
    ("LeavesAFile", "teardown", "left.txt is new"),
    ("ChangesTheDtype", "teardown", "torch's default dtype is another"),
    ("ClosesOnce", "teardown", "closing it twice fails: IndexError"),
    ("TakesNumbersOnly", "logs", "log_table fails: TypeError"),
    ("DoesNotCommute", "commutes", "commutes with gradient_clipping, and the order makes a difference of"),
]


def request_of(name: str) -> str:
    return str(FAULTY / name) if name.endswith(".py") else f"{FAULTY / 'faulty.py'}:{name}"


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    made = Kit(Subject.of(request_of(request.param)))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kit", "check", "told"), FAULTS, indirect=["kit"], ids=[f"{name}-{check}" for name, check, _ in FAULTS]
)
def test_a_fault_is_found_by_the_check_that_is_meant_for_it(kit: Kit, check: str, told: str) -> None:
    result = kit.perform(CHECKS[check])
    assert result.verdict == "refuted"
    assert told in result.detail


def test_every_check_finds_a_fault() -> None:
    assert {check for _, check, _ in FAULTS} == set(CHECKS)
    assert len({name for name, _, _ in FAULTS}) >= 25


def test_what_a_plugin_says_it_does_not_support_is_proven_to_be_refused() -> None:
    kit = Kit(Subject.of(str(FAULTY / "narrow.py")))
    try:
        found = {name: str(kit.perform(CHECKS[name])) for name in ("ddp", "fsdp", "microbatches", "retry", "resume")}
    finally:
        kit.close()
    assert found == {
        "ddp": "refused: it counts what one process sees",
        "fsdp": "refused: it counts what one process sees",
        "microbatches": "refused: it counts whole batches",
        "retry": "refused: it counts whole batches",
        "resume": "refused: it counts from the start",
    }
