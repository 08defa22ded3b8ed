"""Reading safetensors files: as the library does, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import PolicyError
from verify.tensor_file import TensorFile

TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    tensors = {str(dtype): (100 * torch.rand(3, 5, 7)).to(dtype) for dtype in TYPES}
    tensors |= {"single": torch.tensor(2.5), "empty": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_every_tensor_is_what_the_library_reads(path: Path) -> None:
    file, whole = TensorFile(path), load_file(path)
    assert set(file.names) == whole.keys()
    for name, tensor in whole.items():
        found = file.tensor(name)
        assert found.dtype is tensor.dtype and found.shape == file.shape(name) == tensor.shape
        assert found.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_a_tensor_outlives_its_file(path: Path) -> None:
    found = TensorFile(path).tensor("torch.float64")
    whole = load_file(path)["torch.float64"]
    path.unlink()
    gc.collect()
    assert found.equal(whole)


def test_a_file_that_is_cut_off_or_of_a_type_nobody_knows_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-1])
    with pytest.raises(PolicyError, match="the tensors end at byte"):
        TensorFile(tmp_path / "cut.safetensors")
    (tmp_path / "odd.safetensors").write_bytes(data.replace(b'"F64"', b'"X64"'))
    with pytest.raises(PolicyError, match="of type X64"):
        TensorFile(tmp_path / "odd.safetensors").tensor("torch.float64")
    (tmp_path / "less.safetensors").write_bytes(data.replace(b'"F64"', b'"F32"'))
    with pytest.raises(PolicyError, match="does not fit"):
        TensorFile(tmp_path / "less.safetensors").tensor("torch.float64")


def test_reading_leaves_nothing_behind(path: Path) -> None:
    def read(times: int) -> int:
        for _ in range(times):
            file = TensorFile(path)
            for name in file.names:
                file.tensor(name).clone()
        gc.collect()
        return sys.getallocatedblocks()

    before = read(20)
    assert read(200) - before < 200  # one a time would be as many; the library's reader leaves 6,000


WRITE = """
import resource, sys
from pathlib import Path
import torch
from verify.tensor_file import write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    write_tensors(Path(sys.argv[1]), {"a": torch.zeros(100_000)})
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_file_that_the_system_does_not_let_grow_is_the_system_s_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    done = subprocess.run([sys.executable, "-c", WRITE, str(path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{errno.EFBIG} {path}\n", done.stderr
