"""The corpus: which files, on which side, and windows that hold their bytes."""

import sysconfig
from pathlib import Path

import pytest
import torch
from kernel_core.errors import DataError
from kernel_plugin_stdlib import ByteWindows, collate_windows, read_corpus, source_files, split_of
from kernel_plugin_stdlib.data import spread_windows, windows_of

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def make_tree(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("pass\n")
    return root


def test_no_file_is_in_both_splits_and_each_is_in_one() -> None:
    trained, heldout = (read_corpus(split).numpy().tobytes() for split in ("train", "heldout"))
    sides = {"train": trained, "heldout": heldout}
    files = source_files()
    assert len(files) == len(set(files)) > 300
    for side, data in sides.items():
        sources = [(STDLIB / path).read_bytes() for path in files if split_of(path) == side]
        assert data == b"\0" + b"".join(source + b"\0" for source in sources)
    assert len(trained) + len(heldout) == 2 + sum((STDLIB / path).stat().st_size + 1 for path in files)


def test_about_a_twentieth_of_the_files_is_held_out() -> None:
    # 4000 draws: five standard deviations are 0.017.
    drawn = [split_of(f"package/module_{number}.py") for number in range(4000)]
    assert drawn.count("heldout") / 4000 == pytest.approx(0.05, abs=0.017)
    assert 0.01 < sum(split_of(path) == "heldout" for path in source_files()) / len(source_files()) < 0.1


def test_sides_never_change() -> None:
    # Were these to change, figures of old and new runs would no longer compare.
    heldout = ["this.py", "random.py", "csv.py", "http/__init__.py"]
    trained = ["os.py", "abc.py", "json/decoder.py", "re/__init__.py"]
    assert {split_of(path) for path in heldout} == {"heldout"}
    assert {split_of(path) for path in trained} == {"train"}


def test_tests_idlelib_packages_and_other_kinds_of_files_are_left_out(tmp_path: Path) -> None:
    kept = {"os.py", "json/decoder.py", "latest/testing.py"}
    others = {"test/a.py", "json/tests/b.py", "idlelib/c.py", "site-packages/torch/d.py", "dist-packages/e.py"}
    others |= {"__pycache__/f.py", "_sysconfigdata__linux_x86_64.py", "pydoc_data/_pydoc.css"}
    assert set(source_files(make_tree(tmp_path, *kept, *others))) == kept
    assert not [path for path in source_files() if path.startswith(("test/", "idlelib/", "site-packages/"))]


def test_the_order_of_files_is_that_of_their_names_digests_on_every_machine(tmp_path: Path) -> None:
    paths = [f"{letter}/{letter}.py" for letter in "abcdefgh"]
    for folder, made in (("one", paths), ("two", paths[::-1])):
        found = source_files(make_tree(tmp_path / folder, *made))
        assert [path[0] for path in found] == list("dhecbagf")


def test_a_corpus_may_be_capped() -> None:
    capped = read_corpus("train", 10_000)
    assert capped.dtype == torch.uint8
    assert torch.equal(capped, read_corpus("train")[:10_000])


def test_a_library_without_sources_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        source_files(tmp_path)
    assert str(error.value) == (
        f"stdlib: there are no Python source files below {tmp_path}. Expected those of the standard library. "
        "Run with a Python whose library is neither zipped nor stripped of its sources."
    )


def test_windows_are_the_corpus_without_overlap_and_without_gap() -> None:
    windows = ByteWindows(windows_of(torch.arange(11, dtype=torch.uint8), 4))
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(windows) == 2


def test_a_batch_holds_real_source_bytes() -> None:
    files = source_files()
    data = read_corpus("train", 20_000)
    windows = ByteWindows(windows_of(data, 128))
    batch = collate_windows([windows[index] for index in range(len(windows))])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].shape == (156, 128)
    assert torch.equal(batch["labels"], batch["input_ids"])
    first = next(path for path in files if split_of(path) == "train" and (STDLIB / path).stat().st_size > 127)
    place = bytes(data.tolist()).find((STDLIB / first).read_bytes()[:100])
    assert place >= 0
    window = bytes(batch["input_ids"][place // 128].tolist())
    assert window in b"\0" + b"".join(
        (STDLIB / path).read_bytes() + b"\0" for path in files if split_of(path) == "train"
    )


def test_spread_windows_reach_from_the_beginning_to_the_end() -> None:
    data = torch.arange(100)
    assert spread_windows(data, 4, 3).tolist() == [[0, 1, 2], [25, 26, 27], [50, 51, 52], [75, 76, 77]]
    assert len(spread_windows(data, 1000, 30)) == 3
    assert len(spread_windows(data, 40, 2)) == 40


@pytest.mark.parametrize(("length", "num_bytes"), [(128, 100), (1, 100), (0, 100), (2, 0)])
def test_windows_that_do_not_fit_or_predict_nothing_are_refused(length: int, num_bytes: int) -> None:
    with pytest.raises(DataError) as error:
        windows_of(torch.zeros(num_bytes), length)
    assert str(error.value) == (
        f"stdlib: cannot cut {num_bytes} bytes into windows of {length}. Expected windows of at least 2 bytes and bytes "
        "for at least one. Choose another window length or read more bytes."
    )
