"""Tensors go into files of a checkpoint in pieces and come back whole, or as whatever part a rank holds; others read them too."""

import json
import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_core import TrainableModel, Trainer
from kernel_core.checkpoint.codec import write_json
from kernel_core.checkpoint.files import LocalFiles, is_intact, verify
from kernel_core.checkpoint.locate import locate
from kernel_core.checkpoint.manifest import FileRecord, Manifest, checksum
from kernel_core.checkpoint.pieces import Box, Piece, overlap, pieces_of
from kernel_core.checkpoint.reader import Reader, StoredTensor, rank_file, tensor_file
from kernel_core.checkpoint.safetensors_file import NAME_OF_DTYPE, Layout, TensorFile, read_header
from kernel_core.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsavableError,
)
from kernel_core.models import Classifier
from kernel_core.testing.ranks import run_on_ranks
from kernel_core.timing import Timestamp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def bitwise(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    layout = Layout.of(list(tensors), list(tensors.values()))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.fill(buffer, list(tensors.values()))
    return b"".join(bytes(block) for block in layout.blocks(buffer))


def bits_of(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of any bits at all, nan payloads too."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    found = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return found.view(dtype).view(tuple(shape)) if size else torch.empty(tuple(shape), dtype=dtype)


def every_kind() -> dict[str, Tensor]:
    tensors = {}
    for dtype, name in NAME_OF_DTYPE.items():
        for shape in [(), (3,), (0,), (2, 0, 3), (3, 1, 5)]:
            tensors[f"{name}.{'x'.join(map(str, shape))}"] = bits_of(shape, dtype, len(tensors))
    tensors |= {
        name: bits_of((2,), torch.float32, 9) for name in ["", "é/ü", "\U0001f600", 'a"b\\', "a b", "\n", "a.b#2"]
    }
    tensors["transposed"] = bits_of((3, 4), torch.float32).T
    tensors["expanded"] = torch.tensor([1.5]).expand(7)
    tensors["conjugate"] = torch.tensor([1 + 2j]).conj()
    return tensors


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = every_kind()
    (tmp_path / "a").write_bytes(to_bytes(tensors))
    found = load_file(tmp_path / "a")
    assert set(found) == set(tensors)
    assert [name for name in tensors if not bitwise(found[name], tensors[name].resolve_conj())] == []


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.resolve_conj().contiguous() for name, tensor in every_kind().items()}
    save_file(tensors, tmp_path / "a", metadata={"of": "é"})
    file = TensorFile(tmp_path / "a", "a")
    assert set(file.entries) == set(tensors)
    assert [name for name in tensors if not bitwise(file.tensor(name), tensors[name])] == []


def test_every_tensor_is_aligned_so_that_it_can_be_mapped() -> None:
    data = to_bytes(every_kind())
    for entry in read_header(data, len(data), "a").values():
        assert entry.start % entry.dtype.itemsize == 0


def test_tensors_that_others_left_unaligned_are_read(tmp_path: Path) -> None:
    value = bits_of((3,), torch.float64)
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F64", "shape": [3], "data_offsets": [1, 25]},
    }
    (tmp_path / "a").write_bytes(with_header(header, b"\x07" + raw(value)))
    assert bitwise(TensorFile(tmp_path / "a", "a").tensor("b"), value)


def test_a_tensor_outlives_its_file_and_writing_to_it_changes_memory_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(to_bytes({"w": torch.ones(3)}))
    file = TensorFile(path, "a")
    tensor = file.tensor("w")
    del file
    path.unlink()
    tensor += 1
    assert tensor.tolist() == [2, 2, 2]


def with_header(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def entry(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


HEADERS: list[tuple[bytes, str]] = [
    (b"", "has 0 bytes"),
    (b"1234567", "has 7 bytes"),
    (struct.pack("<Q", 2**63), "announces a header of 9223372036854775808 bytes"),
    (struct.pack("<Q", 1) + b"", "announces a header of 1 bytes in a file of 8"),
    (with_header(one(), bytes(8), length=99_999_999), "announces a header of 99999999"),
    (with_header(b"\x80\x04}."), "is not JSON"),
    (with_header(b"[]"), "its header is no object"),
    (with_header(b"{" + b'"a":{' * 5000), "is not JSON"),
    (with_header(b'{"a":1,"a":2}'), "a key that comes twice"),
    (with_header(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)), "the number NaN"),
    (with_header(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8)), "the number 1e999"),
    (with_header(b'{"\xff":1}'), "utf-8"),
    (with_header({"__metadata__": {"a": 1}}), "__metadata__ of its header is not text"),
    (with_header({"__metadata__": [1]}), "__metadata__ of its header is not text"),
    (with_header({"w": 1}), "'w': "),
    (with_header({"w": [1, 2]}), "'w': "),
    (with_header({"w": None}), "'w': "),
    (with_header(one(more=1), bytes(8)), "expected dtype, shape and data_offsets"),
    (with_header({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "expected dtype, shape and data_offsets"),
    (with_header(one(dtype="F33"), bytes(8)), "the dtype 'F33'"),
    (with_header(one(dtype=["F32"]), bytes(8)), "'w': "),
    (with_header(one(dtype="float32"), bytes(8)), "the dtype 'float32'"),
    (with_header(one(shape=[-2]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[-1, -2]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[2.0]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[True, 2]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=["2"]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[None]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[2**62]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[10**4000]), bytes(8)), "a number that is no size"),
    (with_header(one(shape=[2**40, 2**40, 0], data_offsets=[0, 0])), "a shape that no tensor has"),
    (with_header(one(shape=[2**32, 2**32]), bytes(8)), "a shape that no tensor has"),
    (with_header(one(shape={}, data_offsets=[0, 4]), bytes(4)), "expected lists"),
    (with_header(one(shape="2"), bytes(8)), "expected lists"),
    (with_header(one(shape=[3]), bytes(8)), "8 bytes for a shape of 12"),
    (with_header(one(shape=[0]), bytes(8)), "8 bytes for a shape of 0"),
    (with_header(one(data_offsets=[8, 0]), bytes(8)), "-8 bytes"),
    (with_header(one(data_offsets=[0, 8, 9]), bytes(8)), "'w': "),
    (with_header(one(data_offsets=[-8, 0]), bytes(8)), "a number that is no size"),
    (with_header(one(data_offsets="08"), bytes(8)), "expected lists"),
    (with_header(one(), bytes(7)), "its tensors end at byte"),
    (with_header(one(), bytes(9)), "its tensors end at byte"),
    (with_header(one(data_offsets=[8, 16]), bytes(16)), "overlap or leave gaps"),
    (with_header({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)), "overlap or leave gaps"),
    (with_header({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)), "overlap or leave gaps"),
    (with_header({"a": entry(0, 4), "b": entry(5, 6)}, bytes(6)), "overlap or leave gaps"),
    (with_header({"a": entry(0, 4), "b": entry(2, 2)}, bytes(4)), "overlap or leave gaps"),
]


@pytest.mark.parametrize(("data", "problem"), HEADERS, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"^model: ") as told:
        dict(TensorFile(tmp_path / "a", "model").entries)
    assert problem in str(told.value)
    assert len(str(told.value)) < 400


def test_truth_values_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(with_header(one(dtype="BOOL"), b"\x01\x02").replace(b"[0, 8]", b"[0, 2]"))
    with pytest.raises(CheckpointFormatError, match="holds truth values other than 0 and 1"):
        TensorFile(tmp_path / "a", "a").tensor("w")


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_change_of_a_header_makes_a_tensor_of_memory_beyond_the_file(place: int, change: int) -> None:
    data = bytearray(to_bytes({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int64), "c": torch.ones(())}))
    (length,) = struct.unpack("<Q", data[:8])
    data[place % (8 + length)] ^= change
    try:
        entries = read_header(bytes(data), len(data), "a")
    except CheckpointFormatError:
        return
    assert all(8 <= entry.start <= entry.end <= len(data) for entry in entries.values())
    assert all(entry.end - entry.start == math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(to_bytes({"w": torch.ones(1)}))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        TensorFile(tmp_path / "b", "b")


# --- pieces -----------------------------------------------------------------------------------------------------------


def write(folder: Path, ranks: Sequence[Sequence[Piece]], **more: Any) -> Reader:
    """Write a checkpoint of weights as several ranks would; ``more`` goes into the first rank's document."""
    files = {"lock.json": b"{}"}
    for rank, pieces in enumerate(ranks):
        files |= files_of(rank, pieces, **(more if rank == 0 else {}))
    for name, data in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    records = {name: FileRecord(len(data), checksum([data])) for name, data in files.items()}
    finish(folder, records, len(ranks))
    found = locate(str(folder))
    return Reader(found, LocalFiles(found))


def files_of(rank: int, pieces: Sequence[Piece], **more: Any) -> dict[str, bytes]:
    name = tensor_file("model", rank)
    parts = {piece.name: [list(piece.shape), list(piece.offset)] for piece in pieces if not piece.is_whole}
    document = {"parts": {name: parts} if pieces else {}, **more}
    files = {rank_file(rank): write_json(document)}
    return {**files, name: to_bytes({piece.name: piece.tensor for piece in pieces})} if pieces else files


def finish(folder: Path, records: dict[str, FileRecord], world_size: int) -> None:
    manifest = Manifest("run", "", 1, Timestamp(), world_size, True, 1.5, records)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


class Part:
    """What this rank holds of a tensor, as a DTensor tells it."""

    device_mesh = None
    placements = ()

    def __init__(self, shape: Sequence[int], box: Box) -> None:
        self.shape, self.box = tuple(shape), box
        self.local = torch.full(box[1], -1, dtype=torch.int64)
        self.device_mesh = self

    def get_coordinate(self) -> list[int]:
        return []

    def to_local(self) -> Tensor:
        return self.local

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.box[0]), torch.Size(self.box[1]))]


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[Box], Box]:
    """A shape, boxes that cover it, and one more box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        for start, length in [(0, at), (at, size[axis] - at)]:
            moved, cut = list(offset), list(size)
            moved[axis], cut[axis] = offset[axis] + start, length
            boxes.append((tuple(moved), tuple(cut)))
    start = [draw(st.integers(0, length)) for length in shape]
    size = [draw(st.integers(0, length - first)) for first, length in zip(start, shape, strict=True)]
    return shape, boxes, (tuple(start), tuple(size))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


@settings(max_examples=100, deadline=None, database=None)
@given(cuts())
def test_a_tensor_cut_in_any_way_comes_back_whole_and_in_any_part(tmp_path_factory: Any, cut: Any) -> None:
    shape, boxes, target = cut
    value = torch.arange(math.prod(shape)).reshape(shape)
    ranks = [[Piece("w", value[slices(box)], shape, box[0])] for box in boxes]
    reader = write(tmp_path_factory.mktemp("cut"), ranks)
    stored = reader.tensors("model")["w"]
    assert bitwise(stored.whole(), value)
    part = Part(shape, target)
    stored.copy_into(part)  # type: ignore[arg-type]
    assert torch.equal(part.local, value[slices(target)])


@settings(max_examples=200, deadline=None, database=None)
@given(cuts(), cuts())
def test_boxes_meet_where_the_elements_say(one: Any, other: Any) -> None:
    (shape, _, a), (other_shape, _, b) = one, other
    if len(shape) != len(other_shape):
        return
    marks = [np.zeros((13,) * len(shape), dtype=bool) for _ in range(2)]
    for mark, box in zip(marks, (a, b), strict=True):
        mark[slices(box)] = True
    both = marks[0] & marks[1]
    found = overlap(a, b)
    assert (found is None) == (not both.any())
    if found is not None:
        for (offset, size), inner in zip((a, b), found, strict=True):
            mine = np.zeros_like(both)
            mine[slices((offset, size))][inner] = True
            assert (mine == both).all()


def quarters() -> list[list[Piece]]:
    value = torch.arange(16.0).reshape(4, 4)
    corners = [(0, 0), (0, 2), (2, 0), (2, 2)]
    return [[Piece("w", value[r : r + 2, c : c + 2], (4, 4), (r, c))] for r, c in corners]


def changed(rank: int, **changes: Any) -> list[list[Piece]]:
    ranks = quarters()
    old = ranks[rank][0]
    fields = {"name": old.name, "tensor": old.tensor, "shape": old.shape, "offset": old.offset, **changes}
    ranks[rank] = [Piece(**fields)]
    return ranks


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([*quarters()[:3], []], "overlap, or some are missing"),
        ([*quarters(), quarters()[1]], "overlap, or some are missing"),
        (changed(3, offset=(2, 0)), "overlap, or some are missing"),
        (changed(3, offset=(1, 2)), "overlap, or some are missing"),
        (changed(3, offset=(3, 2)), "leads out of its shape"),
        (changed(3, offset=(2**62, 2)), "leads out of its shape"),
        (changed(3, shape=(4, 5)), "several shapes or dtypes"),
        (changed(3, tensor=torch.ones(2, 2, dtype=torch.float64)), "several shapes or dtypes"),
        (changed(3, tensor=torch.ones(4)), "leads out of its shape"),
        (changed(3, shape=(4,), offset=(0,)), "several shapes or dtypes"),
        (changed(3, offset=(-1, 2)), "described wrongly"),
        (changed(3, offset=(2,)), "described wrongly"),
        ([[Piece("w", torch.ones(()), (), ())], [Piece("w", torch.ones(()), (), ())]], "overlap, or some are missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(tmp_path: Path, ranks: Any, problem: str) -> None:
    reader = write(tmp_path / "a", ranks)
    with pytest.raises(CheckpointFormatError, match=problem):
        reader.tensors("model")


@pytest.mark.parametrize(
    "parts",
    [
        {"w": [[2.0], [0]]},
        {"w": [[True], [0]]},
        {"w": ["2", "0"]},
        {"w": [2, 0]},
        {"w": 1},
        {"w": [[2]]},
        [1],
        "ab",
        None,
    ],
    ids=repr,
)
def test_descriptions_of_pieces_that_are_none_are_refused(tmp_path: Path, parts: Any) -> None:
    reader = write(tmp_path / "a", [[Piece("w", torch.ones(2), (2,), (0,))]], parts={"model-00000.safetensors": parts})
    with pytest.raises(CheckpointFormatError, match="pieces are described wrongly"):
        reader.tensors("model")


def test_a_second_name_gives_the_same_tensor(tmp_path: Path) -> None:
    reader = write(tmp_path / "a", [[Piece("w", torch.ones(2), (2,), (0,))]], aliases={"head": "w"})
    tensors = reader.tensors("model")
    assert set(tensors) == {"w", "head"}
    assert bitwise(tensors["head"].whole(), torch.ones(2))


@pytest.mark.parametrize(
    ("aliases", "problem"),
    [
        ({"head": "gone"}, "'head' stands for 'gone', which cannot be"),
        ({"w": "w"}, "'w' stands for 'w', which cannot be"),
        ({"a": "b", "b": "w"}, "'a' stands for 'b', which cannot be"),
        ({"a": 1}, "its aliases are no names"),
        (["w"], "aliases is a list. Expected a dict"),
    ],
)
def test_second_names_of_nothing_are_refused(tmp_path: Path, aliases: Any, problem: str) -> None:
    reader = write(tmp_path / "a", [[Piece("w", torch.ones(2), (2,), (0,))]], aliases=aliases)
    with pytest.raises(CheckpointFormatError, match=problem):
        reader.tensors("model")


def test_a_weight_whose_name_looks_like_a_ranks_own_is_a_weight(tmp_path: Path) -> None:
    reader = write(tmp_path / "a", [[Piece("rank/w", torch.ones(2), (2,), (0,))]])
    assert bitwise(reader.tensors("model")["rank/w"].whole(), torch.ones(2))


def test_another_shape_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    stored = write(tmp_path / "a", quarters()).tensors("model")["w"]
    target = torch.zeros(4, 5)
    with pytest.raises(
        CheckpointMismatchError, match=r"^w: has shape \[4, 4\] in the checkpoint, and \[4, 5\] is expected"
    ):
        stored.copy_into(target)
    assert not target.any()


def test_ranks_share_out_large_tensors_and_each_is_written_once() -> None:
    tensors = {f"w{n}": torch.zeros(2**14 + n) for n in range(5)} | {"small": torch.zeros(3), "none": torch.empty(0, 2)}
    spread = [pieces_of(tensors, rank, 3, spread=True) for rank in range(3)]
    assert sorted(piece.name for pieces in spread for piece in pieces) == sorted(tensors)
    loads = [sum(piece.tensor.nbytes for piece in pieces) for pieces in spread]
    assert max(loads) <= sum(loads) / 3 * 1.3
    assert {"small", "none"} <= {piece.name for piece in spread[0]}
    assert [len(pieces_of(tensors, rank, 3, spread=False)) for rank in range(3)] == [7, 0, 0]


# --- files and manifest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "world_size"),
    [
        ({"rank-00000.json": b"{}"}, 1),
        ({"lock.json": b"{}"}, 1),
        ({"lock.json": b"{}", "rank-00000.json": b"{}"}, 2),
        ({"lock.json": b"{}", "rank-00000.json": b"{}"}, 2**62),
        ({"lock.json": b"{}", "rank-00000.json": b"{}", "rank-00001.json": b"{}"}, 1),
        ({"lock.json": b"{}", "rank-00000.json": b"{}", "model-00001.safetensors": b""}, 1),
    ],
    ids=["no lock", "no rank", "too few ranks", "very many ranks", "too many ranks", "tensors of no rank"],
)
def test_a_manifest_must_name_the_files_of_each_rank(tmp_path: Path, files: Any, world_size: int) -> None:
    finish(tmp_path, {name: FileRecord(len(data), checksum([data])) for name, data in files.items()}, world_size)
    found = locate(str(tmp_path))
    with pytest.raises(CheckpointFormatError, match=rf"its files are not those of a checkpoint of {world_size} ranks"):
        Reader(found, LocalFiles(found))


def test_a_file_that_changed_is_missing_or_is_no_file_is_named(tmp_path: Path) -> None:
    found = write(tmp_path / "a", quarters()).found
    files = LocalFiles(found)
    verify(files, found.manifest.files)
    assert is_intact(found)
    name = "model-00002.safetensors"
    path, data = tmp_path / "a" / name, (tmp_path / "a" / name).read_bytes()

    def refused(problem: str) -> None:
        assert not is_intact(found)
        with pytest.raises(CheckpointCorruptError, match=rf"a: .*{name}.*{problem}.*The checkpoint is damaged"):
            verify(files, found.manifest.files)

    path.write_bytes(data[:-1] + b"\x01")
    refused("is not what was written")
    path.write_bytes(data[:-1])
    refused(rf"has {len(data) - 1} bytes, and {len(data)} were written")
    path.unlink()
    refused("is missing")
    path.mkdir()
    refused("is not a file")
    path.rmdir()
    path.symlink_to(tmp_path / "a" / "lock.json")
    refused("is not a file")
    path.unlink()
    os.mkfifo(path)
    refused("is not a file")


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    found = write(tmp_path / "a", quarters()).found
    path = tmp_path / "a" / "model-00002.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointCorruptError, match=r"model-00002.safetensors is not a file: .*a link leads out of"):
        verify(LocalFiles(found), found.manifest.files)


# --- shards of DTensors -----------------------------------------------------------------------------------------------

LAYOUTS = ("fsdp4", "fsdp2", "tp4", "fsdp2 x tp2", "hsdp 2x2")
WHERE = {"fsdp2": [0, 1]}  # the ranks that take part; all where nothing is said


class Odd(nn.Module):
    """Shapes that nothing divides, fewer rows than ranks, tensors without dimensions or elements, several dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(5, 13, bias=True)
        self.down = nn.Linear(13, 3, bias=False)
        self.row = nn.Parameter(torch.randn(1, 7))
        self.narrow = nn.Parameter(torch.randn(11, 3).bfloat16())
        self.cube = nn.Parameter(torch.randn(6, 2, 3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(seed + 3))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("large", torch.randn(2**15))  # every rank's, and worth being shared out


def meshes() -> dict[str, Any]:
    """Return the mesh of each layout; every rank must call it, those too that are in none."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    return {
        "fsdp4": DeviceMesh("cpu", [0, 1, 2, 3]),
        "fsdp2": DeviceMesh("cpu", WHERE["fsdp2"]),
        "tp4": DeviceMesh("cpu", [0, 1, 2, 3]),
        "fsdp2 x tp2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "hsdp 2x2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    }


def state_of(layout: str, mesh: Any, seed: int) -> dict[str, Tensor]:
    """Return a model laid out over ``mesh``; call it on all ranks of the layout."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Odd(seed)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp4":
        parallelize_module(model, mesh, plan)
    elif layout == "fsdp2 x tp2":
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh)
    state = dict(model.state_dict())
    everywhere = [Replicate()] * mesh.ndim
    state["scalar"] = distribute_tensor(torch.tensor(seed + 0.5), mesh, everywhere)
    state["no columns"] = distribute_tensor(torch.empty(3, 0), mesh, [*everywhere[:-1], Shard(1)])
    state["no rows"] = distribute_tensor(torch.empty(0, 4), mesh, [*everywhere[:-1], Shard(1)])
    return state


def expected() -> dict[str, Tensor]:
    more = {"scalar": torch.tensor(1.5), "no columns": torch.empty(3, 0), "no rows": torch.empty(0, 4)}
    return {**Odd(1).state_dict(), **more}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def exchange(folder: str) -> list[str]:
    """Save on every layout and load on every other; return what differed, and what should have been refused."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    from torch.distributed.tensor._api import DTensor

    states, wrong, mesh_of = {}, [], meshes()
    groups = {layout: dist.new_group(WHERE[layout]) for layout in WHERE}
    for layout in LAYOUTS:
        members = WHERE.get(layout, [0, 1, 2, 3])
        if rank not in members:
            continue
        states[layout] = state_of(layout, mesh_of[layout], 1)
        path = Path(folder) / layout
        path.mkdir(exist_ok=True)
        files = files_of(rank, pieces_of(states[layout], rank, len(members), spread=True))
        for name, data in files.items():
            (path / name).write_bytes(data)
        mine = {name: [len(data), checksum([data])] for name, data in files.items()}
        told: list[Any] = [None] * len(members)
        dist.all_gather_object(told, mine, groups.get(layout))
        if rank == 0:
            (path / "lock.json").write_bytes(b"{}")
            records = {name: FileRecord(*record) for one in told for name, record in one.items()}
            finish(path, {**records, "lock.json": FileRecord(2, checksum([b"{}"]))}, len(members))
    dist.barrier()
    right = expected()
    for source in LAYOUTS:
        found = locate(str(Path(folder) / source))
        tensors = Reader(found, LocalFiles(found)).tensors("model")
        for target in states:
            blank = {name: torch.zeros_like(tensor) for name, tensor in states[target].items()}
            for name, tensor in blank.items():
                tensors[name].copy_into(tensor)
                if not bitwise(whole(tensor), right[name]):
                    wrong.append(f"{source} -> {target}: {name}")
                alike = tensors[name].like(states[target][name])
                if not (type(alike) is type(tensor) and bitwise(whole(alike), right[name])):
                    wrong.append(f"{source} -> like {target}: {name}")
    wrong += refusals(rank, DTensor)
    dist.barrier()
    states.clear()
    mesh_of.clear()
    dist.destroy_process_group()
    return wrong


def refusals(rank: int, DTensor: Any) -> list[str]:
    """Return which shards that cannot be expressed are not refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
    strided = [_StridedShard(0, split_factor=2), Replicate()]
    scattered = DTensor.from_local(torch.ones(4, 1), mesh, strided, run_check=False, shape=(8, 1), stride=(1, 1))
    wrong = []
    for tensor, problem in [
        (partial, "is a sum that the ranks have not added up"),
        (scattered, "several separate pieces"),
    ]:
        try:
            pieces = pieces_of({"w": tensor}, rank, 4, spread=True)
        except UnsavableError as error:
            if problem not in str(error) or not str(error).startswith("w: "):
                wrong.append(f"message {error}")
        else:
            if pieces or rank == 0:
                wrong.append(problem)
    return wrong


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("layouts")
    assert run_on_ranks(4, __file__, "exchange", str(folder), timeout_s=60) == [[]] * 4
    return folder


@pytest.mark.ranks
def test_shards_of_every_layout_load_on_every_other_and_in_one_process(sharded: Path) -> None:
    right = expected()
    for layout in LAYOUTS:
        found = locate(str(sharded / layout))
        assert is_intact(found)
        tensors = Reader(found, LocalFiles(found)).tensors("model")
        assert set(tensors) == set(right)
        assert [name for name in right if not bitwise(tensors[name].whole(), right[name])] == [], layout
        stored = sum(piece.read().nbytes for tensor in tensors.values() for piece in tensor.pieces)
        assert stored == sum(tensor.nbytes for tensor in right.values())  # nothing twice


@pytest.mark.ranks
def test_every_rank_writes_its_own_shards(sharded: Path) -> None:
    def ranks_of(layout: str, name: str) -> list[int]:
        found = locate(str(sharded / layout))
        pieces: StoredTensor = Reader(found, LocalFiles(found)).tensors("model")[name]
        return sorted(int(Path(piece.file.where).name[6:11]) for piece in pieces.pieces)

    assert ranks_of("fsdp4", "up.weight") == [0, 1, 2, 3]
    assert ranks_of("fsdp4", "row") == [0]  # the others' shards are empty
    assert ranks_of("fsdp4", "narrow") == [0, 1, 2, 3]
    assert ranks_of("hsdp 2x2", "up.weight") == [0, 1]  # 2 and 3 hold the same
    assert ranks_of("fsdp2 x tp2", "up.weight") == [0, 1, 2, 3]


class Blocks(TrainableModel):
    """What tensor parallelism splits, and what it leaves alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.norm(self.block(batch[0])))  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def blocks(seed: int, parallelism: Any, **more: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(3)
    ]
    model = Blocks(seed)
    return Trainer(
        model=model,
        train_dataloader=batches,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ba",
        parallelism=parallelism,
        device="cpu",
        progress_bar=False,
        **more,
    )


def split_both_ways(folder: str) -> dict[str, str] | None:
    """Train sharded and split, save, and return what the whole tensors are."""
    plan = {"block.0": "colwise", "block.2": "rowwise"}
    with blocks(0, {"fsdp": {}, "tensor_parallel": {"degree": 2, "plan": plan}}) as trainer:
        trainer.fit()
        trainer.save_checkpoint(folder, "split")
        state = trainer.state
        model = state.engine.model_state(state.model, full=True)
        moments = state.engine.optimizer_state(state.model, state.optimizers[0], full=True).get("state", {})
    found = {name: raw(tensor).hex() for name, tensor in (model or {}).items()}
    return found | {
        f"{name} {key}": raw(value).hex() for name, one in (moments or {}).items() for key, value in one.items()
    }


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_is_sharded_and_split_is_resumed_in_one_process(tmp_path: Path) -> None:
    told = run_on_ranks(4, __file__, "split_both_ways", str(tmp_path), timeout_s=100)[0]
    with blocks(1, None, load_path=str(tmp_path / "split")) as trainer:
        state = trainer.state
        found = {name: raw(tensor).hex() for name, tensor in state.model.state_dict().items()}
        moments = state.engine.optimizer_state(state.model, state.optimizers[0], full=True).get("state", {})
        found |= {f"{name} {key}": raw(value).hex() for name, one in moments.items() for key, value in one.items()}
    assert len(found) == 8 * 4
    assert found == told


# --- the documentation ------------------------------------------------------------------------------------------------


def example(heading: str) -> str:
    text = DOCS.read_text().split(heading)[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.ranks
def test_the_documented_way_to_read_shards_needs_safetensors_alone(sharded: Path) -> None:
    right = expected()
    assert "kernel_core" not in example("### Sharded")
    for layout in LAYOUTS:
        scope: dict[str, Any] = {"folder": sharded / layout}
        exec(example("### Sharded"), scope)  # the page's own words
        assert set(scope["weights"]) == set(right)
        assert [name for name in right if not bitwise(scope["weights"][name], right[name])] == [], layout


def test_the_documented_way_to_read_whole_weights_does() -> None:
    scope: dict[str, Any] = {"folder": GOLDEN / "version-1"}
    exec(example("### Whole"), scope)
    assert set(scope["weights"]) == set(golden_model().state_dict())


def test_the_page_names_every_tag_and_every_dtype() -> None:
    from kernel_core.checkpoint.codec import _DECODERS

    text = DOCS.read_text()
    tags = {*_DECODERS, "$tensor", "$array", "$rank"}
    assert {tag for tag in tags if f"| `{tag}` |" not in text} == set()
    assert set(re.findall(r"^\| `(\$\w+)` \|", text, re.MULTILINE)) == tags
    assert {name for name in NAME_OF_DTYPE.values() if f"`{name}`" not in text} == set()


# --- a checkpoint of each released version is kept --------------------------------------------------------------------


def golden_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))
    return Classifier(layers, num_classes=3)


def golden_trainer(**more: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator))
    model = golden_model()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, 4, shuffle=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="2ep",
        run_name="golden",
        seed=5,
        device="cpu",
        progress_bar=False,
        **more,
    )


def make_golden(folder: str) -> None:
    """Write the checkpoint that is kept, and what must come out of it; call it once for each version of the format."""
    with golden_trainer(save_folder=folder, save_filename="version-1", save_interval="4ba") as trainer:
        trainer.fit(duration="4ba")
        model = trainer.state.model.state_dict()
    told = {name: [str(tensor.dtype), list(tensor.shape), raw(tensor).hex()] for name, tensor in model.items()}
    (Path(folder) / "version-1.expected.json").write_text(json.dumps(told, indent=0))


@pytest.mark.parametrize("version", [1])
def test_checkpoints_of_every_released_version_load(version: int) -> None:
    folder = GOLDEN / f"version-{version}"
    told = json.loads((GOLDEN / f"version-{version}.expected.json").read_text())
    assert json.loads((folder / "manifest.json").read_text())["version"] == version
    with golden_trainer(load_path=str(folder)) as trainer:
        state = trainer.state
        model = state.model.state_dict()
        assert {name: [str(one.dtype), list(one.shape), raw(one).hex()] for name, one in model.items()} == told
        assert (state.timestamp.batch, state.timestamp.epoch, state.timestamp.sample) == (4, 0, 16)
        assert {int(one["step"]) for one in state.optimizers[0].state.values()} == {4}
        trainer.fit()
        assert state.timestamp.batch == 12


def test_the_kept_checkpoints_are_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 40_000


def test_safe_open_alone_reads_the_weights() -> None:
    with safe_open(GOLDEN / "version-1" / "model-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(golden_model().state_dict())
