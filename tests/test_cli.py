"""The command line, command by command on one short run, and how it refuses."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from carelite.__main__ import build_parser, main
from helpers import official_state_dict

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "xs"
    main(["train", "--model", "cas_vit_xs", "--epochs", "1", "--warmup-epochs", "0", "--output", str(folder)])
    return folder


def test_train_and_evaluate(run, capsys):
    checkpoint = run / "model.safetensors"
    assert checkpoint.is_file() and (run / "learning_curve.png").is_file()
    main(["evaluate", str(checkpoint)])
    assert "of 360 held-out digits right" in capsys.readouterr().out


def test_predict(run, tmp_path, capsys):
    Image.new("RGB", (40, 30), "white").save(tmp_path / "white.png")
    main(["predict", str(tmp_path / "white.png"), "--checkpoint", str(run / "model.safetensors")])
    out = capsys.readouterr().out
    assert "white.png: " in out and out.count("%") == 5


def test_export_and_verify(run, tmp_path, capsys):
    checkpoint, package = run / "model.safetensors", tmp_path / "model.mlpackage"
    main(["export", str(checkpoint), str(package), "--compress", "int8"])
    main(["verify", str(package), "--checkpoint", str(checkpoint)])
    out = capsys.readouterr().out
    assert "float16 int8" in out and "over 100 images" in out and "\nverified" in out
    (weights,) = package.rglob("weight.bin")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 255
    weights.write_bytes(data)
    with pytest.raises(SystemExit) as status:
        main(["verify", str(package), "--checkpoint", str(checkpoint)])
    assert status.value.code == 1


def test_export_of_what_was_not_trained(tmp_path, capsys):
    """ONNX, random weights only by name, and an official file with the model's name."""
    main(["export", "cas_vit_xs", str(tmp_path / "random.onnx"), "--random-weights", "--image-size", "64"])
    assert "random weights" in capsys.readouterr().out and (tmp_path / "random.onnx").is_file()
    for source in (["cas_vit_xs"], [str(tmp_path / "official.pth"), "--model", "cas_vit_s"]):
        torch.save({"model": official_state_dict("cas_vit_xs")}, tmp_path / "official.pth")
        with pytest.raises(SystemExit) as status:  # no weights, and those of another model
            main(["export", *source[:1], str(tmp_path / "model.mlpackage"), *source[1:]])
        assert status.value.code == 2
    errors = capsys.readouterr().err
    assert "--random-weights" in errors and "another variant" in errors
    assert {p.name for p in tmp_path.iterdir()} == {"random.onnx", "official.pth"}


def test_bench(tmp_path, capsys):
    flags = "--models cas_vit_xs --all-forms --image-size 64 --batch 2 --rounds 2 --repeats 1 --warmup 1 --device cpu"
    main(["bench", *flags.split(), "--growth-sizes", "64", "--output", str(tmp_path)])
    assert "| `cas_vit_xs` | 64 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {(row["form"], row["batch"]): row["milliseconds"] for row in result["times"]}
    assert set(rows) == {("eager", 1), ("eager", 2), ("onnxruntime", 1), ("onnxruntime", 2)}
    assert len(rows["eager", 1]) == 2 and all(value > 0 for times in rows.values() for value in times)
    assert result["models"]["cas_vit_xs"]["top1"] == 78.3 and len(result["growth"]) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"benchmark.json", "benchmark.png"}


@pytest.mark.parametrize(
    "command, message",
    (
        (["evaluate", "nowhere.safetensors"], "nowhere.safetensors"),
        (["train", "--model", "care_s9"], "care_s9"),
        (["train", "--epochs", "0"], "epochs"),
        (["predict", "nowhere.png", "--checkpoint", "nowhere.safetensors"], "nowhere"),
        (["verify", "nowhere.mlpackage", "--checkpoint", "nowhere.safetensors"], "nowhere"),
        (["bench", "--models", "care_s9"], "care_s9"),
    ),
)
def test_bad_input_is_one_clear_line(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as status:
        main(command)
    error = capsys.readouterr().err
    assert status.value.code == 2 and message in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_every_command_has_help(capsys):
    for command in ("demo", "train", "evaluate", "predict", "export", "verify", "bench"):
        with pytest.raises(SystemExit) as status:
            build_parser().parse_args([command, "--help"])
        assert status.value.code == 0 and command in capsys.readouterr().out


def test_python_m_carelite():
    done = subprocess.run([sys.executable, "-m", "carelite", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("carelite ")
