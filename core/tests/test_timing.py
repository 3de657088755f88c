from datetime import timedelta

import pytest
from kernel_core.errors import TimeStringError
from kernel_core.timing import Progress, Time, Timestamp, TimeUnit


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("500ba", 500, "ba"),
        ("1e6tok", 1_000_000, "tok"),
        ("2.0iter", 2, "iter"),
        ("3SP", 3, "sp"),
        ("0.3dur", 0.3, "dur"),
        (".5dur", 0.5, "dur"),
        ("-1ba", -1, "ba"),
        (" 7 sec ", 7, "sec"),
        ("24h", 86_400, "sec"),
        ("90m", 5_400, "sec"),
        ("90s", 90, "sec"),
        ("1h30m15s", 5_415, "sec"),
        ("2h5s", 7_205, "sec"),
        ("100H", 360_000, "sec"),
        ("1.5h", 5_400, "sec"),
        (".5m", 30, "sec"),
    ],
)
def test_a_time_string_is_read(text: str, value: float, unit: str) -> None:
    time = Time.from_timestring(text)
    assert (time.value, time.unit) == (value, TimeUnit(unit))
    assert Time.from_timestring(time.to_timestring()) == time


@pytest.mark.parametrize("text", ["", "ep", "10", "1.5ep", "10 parsecs", "1h2h", "5s5m", "inf ba", "1e400tok", "1_0ep"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(TimeStringError):
        Time.from_timestring(text)


def test_messages_say_what_was_expected() -> None:
    with pytest.raises(TimeStringError, match=r"cannot read 'soon'\. Expected a number and a unit"):
        Time.from_timestring("soon")
    with pytest.raises(TimeStringError, match=r"unknown unit 'bat'\. Did you mean 'ba'\?"):
        Time.from_timestring("3bat")
    with pytest.raises(TimeStringError, match=r"1\.5ep is not a whole number"):
        Time.from_timestring("1.5ep")
    with pytest.raises(TimeStringError, match=r"3 has no unit"):
        Time.from_input(3)


def test_arithmetic_keeps_the_unit() -> None:
    assert Time(3, "ep") + 2 == Time(5, "ep") == 2 + Time(3, "ep")
    assert Time(3, "ep") - "1ep" == Time(2, "ep")
    assert 10 - Time(3, "ba") == Time(7, "ba")
    assert Time(7, "ba") % 4 == Time(3, "ba")
    assert Time(3, "ba") / Time(4, "ba") == Time(0.75, "dur")
    assert Time(7, "ba") * 0.5 == Time(3, "ba")
    assert Time(10, "ba") * Time(0.25, "dur") == Time(2, "ba") == Time(0.25, "dur") * Time(10, "ba")
    assert -Time(3, "ba") == Time(-3, "ba")
    with pytest.raises(TimeStringError, match="units must be equal"):
        Time(3, "ba") + Time(3, "ep")
    with pytest.raises(TimeStringError, match="One of them must be a 'dur'"):
        Time(3, "ba") * Time(3, "ep")


def test_comparison_and_hash_agree() -> None:
    assert Time(3, "ba") < "4ba"
    assert Time(3, "ba") >= 3
    assert Time(3, "ba") != Time(3, "ep")
    assert Time(3, "ba") == "3ba"
    assert Time(3, "ba") == 3 == Time(3, "ep")
    assert hash(Time(3, "ba")) == hash(3)
    assert Time(1, "ba") != True  # noqa: E712
    assert len({Time(3, "ba"), Time(3, "ba"), Time(3, "ep")}) == 2
    with pytest.raises(TimeStringError, match="cannot compare"):
        assert Time(3, "ba") < Time(3, "ep")


def test_inputs_of_every_kind() -> None:
    assert Time.from_input(2, "ep") == "2ep"
    assert Time.from_input(timedelta(minutes=2)) == "120sec"
    assert Time.from_input(Time(1, "ba")) == "1ba"
    with pytest.raises(TimeStringError, match="not a number"):
        Time(True, "ep")


def test_progress_counts_and_timestamp_is_its_picture() -> None:
    progress = Progress()
    progress.finish_batch(8, 128, 0.5)
    progress.finish_batch(4, 64, 0.25)
    before = progress.timestamp()
    progress.finish_epoch()
    progress.finish_iteration()
    assert before == Timestamp(
        batch=2,
        sample=12,
        token=192,
        token_in_iteration=192,
        batch_in_epoch=2,
        sample_in_epoch=12,
        token_in_epoch=192,
        total_wct=0.75,
        iteration_wct=0.75,
        epoch_wct=0.75,
        batch_wct=0.25,
    )
    after = progress.timestamp()
    assert (after.iteration, after.epoch, after.batch_in_epoch, after.epoch_in_iteration) == (1, 1, 0, 0)
    assert after.get("sp") == "12sp"
    restored = Progress(after)
    assert restored.timestamp() == after
    with pytest.raises(TimeStringError, match="no 'dur'"):
        after.get("dur")


def test_a_timestamp_reads_as_composer_s_callbacks_read_it() -> None:
    timestamp = Timestamp(batch=7, epoch=1, batch_in_epoch=2, total_wct=90.5)
    assert timestamp.batch.value == 7
    assert int(timestamp.batch) % 5 == 2
    assert timestamp.batch_in_epoch == Time(2, "ba")
    assert timestamp.total_wct == timedelta(seconds=90.5)
    assert timestamp < Time(8, "ba")
    assert timestamp >= "1ep"
    assert not timestamp > "90s"
    assert {timestamp: 1}[Timestamp(batch=7, epoch=1, batch_in_epoch=2, total_wct=90.5)] == 1
    assert repr(timestamp) == "Timestamp(epoch=1, batch=7, batch_in_epoch=2, total_wct=90.5)"
    with pytest.raises(AttributeError, match="does not change"):
        timestamp.batch = 3  # type: ignore[misc, assignment]
    with pytest.raises(TypeError, match="no field 'batches'"):
        Timestamp(batches=3)
