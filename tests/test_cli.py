"""The command line, command by command on one short run, and how it refuses."""

import subprocess
import sys

import pytest
from PIL import Image

from carelite.__main__ import build_parser, main

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


@pytest.mark.parametrize("precision", ("float16", "float32"))
def test_export_and_verify(run, precision, tmp_path, capsys):
    checkpoint, package = run / "model.safetensors", tmp_path / "model.mlpackage"
    main(["export", str(checkpoint), str(package), "--precision", precision])
    main(["verify", str(package), "--checkpoint", str(checkpoint)])
    out = capsys.readouterr().out
    assert precision in out and "\nverified" in out
    (weights,) = package.rglob("weight.bin")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 255
    weights.write_bytes(data)
    with pytest.raises(SystemExit) as status:
        main(["verify", str(package), "--checkpoint", str(checkpoint)])
    assert status.value.code == 1


@pytest.mark.parametrize(
    "command, message",
    (
        (["evaluate", "nowhere.safetensors"], "nowhere.safetensors"),
        (["train", "--model", "care_s9"], "care_s9"),
        (["train", "--epochs", "0"], "epochs"),
        (["predict", "nowhere.png", "--checkpoint", "nowhere.safetensors"], "nowhere"),
        (["verify", "nowhere.mlpackage", "--checkpoint", "nowhere.safetensors"], "nowhere"),
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
    for command in ("demo", "train", "evaluate", "predict", "export", "verify"):
        with pytest.raises(SystemExit) as status:
            build_parser().parse_args([command, "--help"])
        assert status.value.code == 0 and command in capsys.readouterr().out


def test_python_m_carelite():
    done = subprocess.run([sys.executable, "-m", "carelite", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("carelite ")
