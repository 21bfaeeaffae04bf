import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agent import checkpoint
from agent.errors import UserError
from consistency.models.catalog import FAMILIES

QWEN3 = FAMILIES["qwen3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [QWEN3.architecture], "vocab_size": 8}))
    save_file({"a": np.ones((3, 5), np.float32), "b": np.zeros(7, np.float16), "step": np.array([1], np.int64)}, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path, *said: str) -> None:
    with pytest.raises(UserError) as error:
        checkpoint.check(folder, QWEN3)
    assert all(part in str(error.value) for part in said) and "\n" not in str(error.value)


def test_a_whole_checkpoint_is_taken(folder):
    assert checkpoint.check(folder, QWEN3) == folder


def test_missing_folder_config_and_weights(folder):
    refused(folder / "absent", "no config.json")
    (folder / "model.safetensors").unlink()
    refused(folder, "no .safetensors file")


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors is truncated", "copy the checkpoint again")


def test_a_shard_that_the_index_names_is_missing(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors", "c": "model-2.safetensors"}}))
    refused(folder, "lacks model-2.safetensors")


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.float16, np.inf), (np.float64, -np.inf)])
def test_nan_and_infinity(folder, dtype, value):
    array = np.ones(40, dtype)
    array[-1] = value
    save_file({"fine": np.ones(4, np.float32), "layers.3.weight": array}, folder / "model-2.safetensors")
    refused(folder, "layers.3.weight holds NaN or infinity")


def test_nan_in_bfloat16(folder):
    bits = np.full(9, 0x3F80, np.uint16)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [9], "data_offsets": [0, 18]}}).encode()
    path = folder / "model-2.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    assert checkpoint.check(folder, QWEN3) == folder
    bits[4] = 0x7FC0
    path.write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    refused(folder, "w holds NaN or infinity")


def test_another_family(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    refused(folder, "LlamaForCausalLM", "needs Qwen3ForCausalLM")
    (folder / "config.json").write_text("[]")
    refused(folder, "no architecture")
    (folder / "config.json").write_text("{")
    refused(folder, "cannot be read")


def test_a_seeded_checkpoint_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="could not be made") as error:
        checkpoint.seeded("no-such-family", "tiny")
    assert "\n" not in str(error.value)


@pytest.mark.engine
def test_a_seeded_checkpoint_is_made_once_and_passes_the_check(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = checkpoint.seeded("qwen3", "tiny")
    assert checkpoint.check(made, QWEN3) == made
    stamp = (made / "config.json").stat().st_mtime_ns
    assert checkpoint.seeded("qwen3", "tiny") == made and (made / "config.json").stat().st_mtime_ns == stamp
