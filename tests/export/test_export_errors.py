# SPDX-License-Identifier: Apache-2.0
"""What `ds_hybridep export` refuses: it names the file and what was expected, and leaves no folder."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import Job, run
from process_pool import ProcessPool

from ds_hybridep.commands.main import main
from ds_hybridep.errors import ExportError
from ds_hybridep.export.folder import ShardWriter, shadow_of, whole_folder
from ds_hybridep.export.stored import StandIn, load
from ds_hybridep.export.stored import whole as in_file

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"
)


@pytest.fixture(scope="module")
def trained(pool2: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints under ZeRO 1, with the model they began from."""
    folder = tmp_path_factory.mktemp("trained")
    pool2.run(run, job=Job(folder=str(folder)))
    return folder


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def said_of(checkpoint: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command says, where it writes nothing."""
    target = checkpoint / "out"
    arguments = ["export", str(checkpoint / "checkpoint"), "--model", str(checkpoint / "base"), "--out", str(target)]
    assert main([*arguments, *options]) == 2
    assert not list(checkpoint.glob("out*"))
    return " ".join(capsys.readouterr().err.split())


def changed_settings(folder: Path, **settings: Any) -> None:
    path = folder / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def of_another_step(path: Path) -> None:
    state = torch.load(path, weights_only=False)
    for one in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["step"] += 5
    torch.save(state, path)


TAG, OF_RANK_1 = "checkpoint/global_step2", "checkpoint/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
# What is done to the files, options, and what is said.
REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "a file is missing": (
        lambda folder: (folder / OF_RANK_1).unlink(),
        (),
        "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing: the checkpoint is of 2 ranks",
    ),
    "a file is cut short": (
        lambda folder: os.truncate(folder / OF_RANK_1, 1000),
        (),
        f"{OF_RANK_1} is cut short, or was not written by torch.save",
    ),
    "a file is of another step": (
        lambda folder: of_another_step(folder / OF_RANK_1),
        (),
        f"{OF_RANK_1} is of optimizer step 7.0, the file of rank 0 of optimizer step 2.0",
    ),
    "the save was interrupted": (
        lambda folder: (folder / TAG / "hybridep_incomplete").touch(),
        (),
        "are incomplete",
    ),
    "other experts": (
        lambda folder: changed_settings(folder, num_local_experts=8),
        (),
        "has experts, rows and columns [4, 64, 16] in the checkpoint and [8, 64, 16]",
    ),
    "another shape": (
        lambda folder: changed_settings(folder, vocab_size=32),
        (),
        "embed_tokens.weight has shape [64, 16] in the checkpoint and [32, 16] in the model",
    ),
    "other names": (
        lambda folder: changed_settings(folder, num_hidden_layers=1),
        (),
        "the model given by --model has no model.layers.1.",
    ),
    "no model": (lambda folder: (folder / "base/config.json").unlink(), (), "transformers finds no model there"),
    "no adapters": (lambda folder: None, ("--adapters",), "--adapters: the training has no adapters"),
    "a wrong dtype": (lambda folder: None, ("--dtype", "int4"), "--dtype: got 'int4'; give one of float32"),
    "no size": (lambda folder: None, ("--max-shard-size", "big"), "got 'big'; give a size such as 5GB"),
}


@needs_transformers
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
class TestCheckpoints:
    """Of a real job."""

    @pytest.mark.parametrize("what", REFUSED)
    def test_what_cannot_be_exported(self, checkpoint: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
        damage, options, said = REFUSED[what]
        damage(checkpoint)
        assert said in said_of(checkpoint, capsys, *options)

    def test_the_disk_gets_full(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(writer: ShardWriter, name: str, tensor: torch.Tensor) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

        monkeypatch.setattr(ShardWriter, "write", write)
        said = said_of(checkpoint, capsys)
        assert "model.safetensors cannot be written: No space left on device; the disk is full" in said

    def test_a_folder_that_is_there(self, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["export", str(checkpoint / "checkpoint"), "--model", str(checkpoint / "base")]
        assert main([*arguments, "--out", str(checkpoint / "base")]) == 2
        assert "base is there already and not empty; remove it, or name another folder" in capsys.readouterr().err
        assert (checkpoint / "base" / "config.json").exists()

    def test_shards_and_dtype(self, checkpoint: Path) -> None:
        arguments = ["export", str(checkpoint / "checkpoint"), "--model", str(checkpoint / "base")]
        target = checkpoint / "out"
        assert main([*arguments, "--out", str(target), "--dtype", "bf16", "--max-shard-size", "8KB"]) == 0
        index = json.loads((target / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 2
        assert all((target / name).stat().st_size < 20_000 for name in files)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    @pytest.mark.slow  # test_export.py loads with them, in a process that has both
    def test_plain_libraries_load_it(self, checkpoint: Path) -> None:
        """In a process that imports neither deepspeed nor ds_hybridep."""
        arguments = ["export", str(checkpoint / "checkpoint"), "--model", str(checkpoint / "base")]
        assert main([*arguments, "--out", str(checkpoint / "out")]) == 0
        program = (
            "import sys, torch, transformers; "
            f"model = transformers.AutoModelForCausalLM.from_pretrained({str(checkpoint / 'out')!r}, dtype='auto'); "
            "tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False); "
            "assert tokens.shape[1] > 3; assert not {'deepspeed', 'ds_hybridep'} & set(sys.modules)"
        )
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=500)
        assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--model", "any", "--out", str(tmp_path / "out")]) == 2
    assert "holds no checkpoint: it has no file `latest`" in capsys.readouterr().err


def test_an_export_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    def write_and_stop() -> None:
        with whole_folder(tmp_path / "out") as partial:
            (partial / "model.safetensors").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert list(tmp_path.iterdir()) == []


OF_OTHERS = (
    "trainer_state.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "model_ema.safetensors",
    "model-ema-00001-of-00001.safetensors",
    "pytorch_model.bin",
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "named-in-the-index.safetensors")
INDEX = "model.safetensors.index.json"


def folder_of_others(target: Path) -> Path:
    """A folder with a sharded model, adapters and more; each file holds "old"."""
    target.mkdir()
    for name in (*OF_OTHERS, *SHARDS[:1], *SHARDS[2:], "model.safetensors"):
        (target / name).write_text("old")
    listed = dict.fromkeys("ab", SHARDS[2]) | {"c": "../outside.safetensors", "d": "missing.safetensors"}
    (target / INDEX).write_text(json.dumps({"weight_map": listed}))
    (target.parent / "outside.safetensors").write_text("old")
    return target


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("new", "gone"),
    [
        (("config.json", "model.safetensors"), {*SHARDS[:1], *SHARDS[2:], INDEX}),
        (("config.json", *SHARDS[:2], INDEX), {SHARDS[2], "model.safetensors"}),
        (("adapter_config.json", "adapter_model.safetensors"), set()),
    ],
    ids=["a whole model", "a whole model in shards", "adapters"],
)
def test_a_save_deletes_no_file_that_it_does_not_replace(tmp_path: Path, new: tuple[str, ...], gone: set[str]) -> None:
    target = folder_of_others(tmp_path / "out")
    before = files_of(target)
    with whole_folder(target, replace=True) as partial:
        for name in new:
            (partial / name).write_text("new")
    kept = {name: text for name, text in before.items() if name not in gone}
    assert files_of(target) == kept | dict.fromkeys(new, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outside.safetensors"]


def test_a_save_that_fails_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    target = folder_of_others(tmp_path / "out")
    (target / "model-00002-of-00002.safetensors").mkdir()  # in the way of a file that comes late
    before = {path.name for path in target.iterdir()}

    def save() -> None:
        with whole_folder(target, replace=True) as partial:
            for name in ("config.json", *SHARDS[:2], INDEX):
                (partial / name).write_text("new")

    with pytest.raises(ExportError, match="cannot be written: Is a directory; nothing was written, and what was"):
        save()
    assert {path.name for path in target.iterdir()} == before
    assert {path.read_text() for path in target.iterdir() if path.is_file() and path.name != INDEX} == {"old"}


def test_a_disk_that_takes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="cannot be written"), whole_folder(tmp_path / "file" / "out"):
        pass


def test_a_whole_model_beside_an_old_adapter_is_said_to_be_hidden(tmp_path: Path) -> None:
    assert "from_pretrained loads the model named there" in shadow_of(folder_of_others(tmp_path / "out"))
    (tmp_path / "out" / "adapter_config.json").unlink()
    assert shadow_of(tmp_path / "out") == ""


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    planned = {"weight": torch.empty(1 << 30, 1 << 20, device="meta")}
    with pytest.raises(ExportError, match=r"the export needs 4503599\.6 GB, and .* GB are free"):
        ShardWriter(tmp_path, "model", planned, 1 << 30)


def test_tensors_of_several_dtypes_are_read_back(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "wide": torch.arange(5, dtype=torch.float64),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
        "matrix": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    }
    writer = ShardWriter(tmp_path, "model", {name: one.to("meta") for name, one in tensors.items()}, 1 << 20)
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.close()
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], one) for name, one in tensors.items())


class Custom:
    """An object of the user in a checkpoint."""

    def __reduce__(self) -> Any:
        return print, ("code of the file ran",)


def test_no_code_of_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = torch.arange(24.0).view(4, 6)
    torch.save({"view": whole[1:, 2:4].T, "half": whole.half()[2], "object": Custom(), "n": 3}, tmp_path / "one.pt")
    loaded = load(tmp_path / "one.pt")
    assert capsys.readouterr().out == ""
    assert isinstance(loaded["object"], StandIn)
    assert loaded["n"] == 3
    assert torch.equal(in_file(loaded["view"]).read(torch.float32), whole[1:, 2:4].T)
    assert torch.equal(in_file(loaded["half"]).read(torch.float32), whole[2])


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "one.pt").write_bytes(b"text")
    with pytest.raises(ExportError, match=r"one\.pt is cut short, or was not written by torch\.save"):
        load(tmp_path / "one.pt")
    with pytest.raises(ExportError, match=r"two\.pt is missing"):
        load(tmp_path / "two.pt")
