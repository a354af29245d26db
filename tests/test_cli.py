"""The command line, command by command on one short run, and how it refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from carelite.__main__ import build_parser, configuration, load_for_export, main
from helpers import official_state_dict

pytestmark = pytest.mark.unchecked


SHORT = "--train-images 64 --batch-size 32 --epochs 1 --warmup-epochs 0".split()


def refused(capsys, *command: str) -> str:
    """What a command that fails says, in one line."""
    with pytest.raises(SystemExit) as status:
        main([*command])
    error = capsys.readouterr().err
    assert status.value.code == 2 and len(error.strip().splitlines()) == 1, error
    return error


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "xs"
    main(["train", "--model", "cas_vit_xs", *SHORT, "--output", str(folder)])
    return folder


def test_train_and_evaluate(run, capsys):
    checkpoint = run / "model.safetensors"
    assert checkpoint.is_file() and (run / "learning_curve.png").is_file()
    assert (run / "config.json").is_file()
    main(["evaluate", str(checkpoint)])
    out = capsys.readouterr().out
    assert "of 360 held-out images right" in out and "among the top five" in out
    assert len([line for line in out.splitlines() if line.startswith("  ")]) == 10  # one for each class
    assert Image.open(run / "confusion.png").width > 300


def test_evaluate_on_folders(tmp_path, capsys):
    """Held-out images stay those of the training when files are added; a folder of its own is evaluated whole."""

    def pictures(place, names, count):
        for name in names:
            (place / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                Image.effect_noise((32, 32), 9 if name == "calm" else 99).save(place / name / f"{i}.png")

    images, test, output = tmp_path / "images", tmp_path / "test", tmp_path / "run"
    pictures(images, ("calm", "wild"), 12), pictures(test, ("calm",), 3)
    recipe = ["--model", "cas_vit_xs", "--batch-size", "8", "--epochs", "1", "--warmup-epochs", "0"]
    main(["train", "--data", f"folder:{images}", *recipe, "--output", str(output)])
    log = json.loads((output / "log.jsonl").read_text())
    evaluating = ["evaluate", str(output / "model.safetensors")]
    main(evaluating)
    main([*evaluating, "--data", f"folder:{test}"])
    out = capsys.readouterr().out
    assert f"{log['val_accuracy']:.2%} of {log['val_images']} held-out images right" in out
    assert f"of 3 images (all in {test}) right" in out and "no held-out images: wild" in out and "nan" not in out
    (output / "config.json").rename(output / "kept.json")
    assert "name the images with --data" in refused(capsys, *evaluating)
    main([*evaluating, "--data", f"folder:{images}"])
    assert "of 24 images" in capsys.readouterr().out
    assert "choose another --output" in refused(
        capsys, "train", "--data", f"folder:{images}", "--output", f"{images}/runs"
    )


def test_a_preset_a_flag_and_a_file(tmp_path, monkeypatch, capsys):
    from carelite import training

    seen = []
    monkeypatch.setattr(training, "train", lambda config, splits, folder, resume: seen.append(config) or stop())

    def stop():
        raise OSError("seen")

    def config_of(*flags):
        with pytest.raises(SystemExit):
            main(["train", *flags])
        return seen.pop()

    short = config_of("--preset", "care", "--epochs", "5", "--image-size", "32")
    assert (short.epochs, short.warmup_epochs, short.mixup, short.image_size) == (5, 1, 0.8, 32)
    for flags, values in (
        ("--preset care --epochs 150", (10, 0, 0)),
        ("--preset care --epochs 600", (20, 0, 0)),
        ("--preset finetune --epochs 3 --init x", (0, 0, 0)),
        ("--preset cas_vit --image-size 32", (20, 32, 32)),
        ("--preset cas_vit --image-size 64", (20, 32, 96)),
        ("--preset cas_vit --image-size 64 --max-size 192", (20, 160, 192)),
    ):
        config = configuration(build_parser().parse_args(["train", *flags.split()]))
        assert (config.warmup_epochs, config.min_size, config.max_size) == values, flags
    training.write_config(short, tmp_path / "config.json")
    assert config_of("--config", str(tmp_path / "config.json")) == short
    state = dict(config=dataclasses.asdict(short), progress={}) | dict.fromkeys(
        ("classes", "images", "totals", "model", "ema", "optimizer", "scaler")
    )
    torch.save(state, tmp_path / "state.pt")
    again = config_of("--resume", str(tmp_path), "--model", "cas_vit_xs")
    assert again.model == "cas_vit_xs" and again.mixup == 0.8  # and `train` will refuse it
    capsys.readouterr()
    assert "leave --output out" in refused(capsys, "train", "--resume", str(tmp_path), "--output", "elsewhere")
    (tmp_path / "state.pt").write_bytes(b"junk")
    assert "damaged" in refused(capsys, "train", "--resume", str(tmp_path))
    monkeypatch.setattr(training, "measure_training", None)
    monkeypatch.setattr("carelite.__main__.photographs", lambda folder, batch_size: stop())
    for flags, size in (([], "batches of 32, 1 workers"), (["--config", str(tmp_path / "config.json")], "of 128, 0")):
        with pytest.raises(SystemExit):
            main(["bench-training", *flags])
        assert size in capsys.readouterr().out


def test_predict(run, tmp_path, capsys):
    Image.new("RGB", (40, 30), "white").save(tmp_path / "white.png")
    main(["predict", str(tmp_path / "white.png"), "--checkpoint", str(run / "model.safetensors")])
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(SystemExit) as status:
        main(["predict", str(tmp_path), "--checkpoint", str(run / "model.safetensors")])
    out, error = capsys.readouterr()
    assert out.count("white.png: ") == 2 and out.count("%") == 10
    assert "broken.png cannot be read" in error and "1 of 2" in error and status.value.code == 2


def test_compare(tmp_path, capsys, monkeypatch):
    from carelite import training

    files = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path / "results.json")]
    comparing = ["compare", "--models", "cas_vit_xs", *SHORT, *files]
    main(comparing)
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["recipe"]["train_images"] == 64 and "--train-images 64" in report["command"]
    assert report["models"]["cas_vit_xs"]["log"][-1]["val_images"] == 360
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", None)
        main(comparing)  # nothing is trained again, also where only the run is left
        (tmp_path / "results.json").unlink()
        main(comparing)
        assert json.loads((tmp_path / "results.json").read_text()) == report
        assert "is a folder" in refused(capsys, *comparing[:-1], str(tmp_path))
        assert "another recipe" in refused(capsys, *comparing, "--lr", "1")
        log = tmp_path / "runs" / "cas_vit_xs" / "log.jsonl"
        for path, complaint in ((tmp_path / "results.json", "on other images"), (log, "trained anew")):
            path.write_text(path.read_text().replace("64 + 360 images", "65 + 360 images"))
            patch.setattr(training, "train", lambda *args, **kwargs: open(tmp_path / "trained anew"))
            assert complaint in refused(capsys, *comparing)
            (tmp_path / "results.json").unlink(missing_ok=True)
        (tmp_path / "results.json").write_text("[]")
        assert "no file of results" in refused(capsys, *comparing)


@pytest.mark.slow
def test_bench_training(capsys):
    main(["bench-training", "--model", "cas_vit_xs", "--image-size", "64", "--batch-size", "4", "--steps", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [layout, pipeline] for layout in ("default", "channels_last") for pipeline in ("without", "with")
    ]
    assert all(float(row[2]) > 0 and float(row[3].replace(",", "")) > 100 for row in rows)


def test_export_and_verify(run, tmp_path, capsys):
    checkpoint, package = run / "model.safetensors", tmp_path / "model.mlpackage"
    main(["export", str(checkpoint), str(package), "--compress", "int8"])
    main(["verify", str(package), "--checkpoint", str(checkpoint)])
    out = capsys.readouterr().out
    assert "float16 int8" in out and "over 100 images" in out and "\nverified" in out
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join("0124356789"))
    with pytest.raises(SystemExit) as status:
        main(["verify", str(package), "--checkpoint", str(checkpoint), "--classes", str(labels)])
    assert status.value.code == 1 and "label 3 of the package is '3'" in capsys.readouterr().out
    (weights,) = package.rglob("weight.bin")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 255
    weights.write_bytes(data)
    with pytest.raises(SystemExit) as status:
        main(["verify", str(package), "--checkpoint", str(checkpoint)])
    assert status.value.code == 1


def test_bad_exports(run, tmp_path, capsys):
    """One line that says what is wrong, before any work."""
    labels = tmp_path / "latin.txt"
    labels.write_bytes("Käse".encode("latin-1"))
    checkpoint = str(run / "model.safetensors")
    for flags, message in (
        (["--image-size", "0"], "image_size=0"),
        (["--image-size", "-224"], "image_size=-224"),
        (["--pyramid", "--classes", str(labels)], "leave --classes"),
        (["--classes", str(labels)], f"{labels} is no text"),
        (["--model", "care_s0"], "is of cas_vit_xs, not of care_s0"),
        ([str(tmp_path / "x.mlmodel")], "must end in .mlpackage"),
    ):
        with pytest.raises(SystemExit) as status:
            main(["export", checkpoint, *flags])
        error = capsys.readouterr().err
        assert status.value.code == 2 and message in error and len(error.strip().splitlines()) == 1
    for flags in ([], ["--model", "cas_vit_xs"]):  # what the checkpoint says of itself holds with --model too
        _, known = load_for_export(build_parser().parse_args(["export", checkpoint, *flags]))
        assert known["image_size"] == 32 and known["classes"] == tuple("0123456789")


def test_export_of_what_was_not_trained(tmp_path, capsys):
    """ONNX, random weights only by name, and an official file with the model's name."""
    main(["export", "cas_vit_xs", str(tmp_path / "random.ONNX"), "--random-weights", "--image-size", "64"])
    assert "random weights" in capsys.readouterr().out and (tmp_path / "random.ONNX").is_file()
    for source in (["cas_vit_xs"], [str(tmp_path / "official.pth"), "--model", "cas_vit_s"]):
        torch.save({"model": official_state_dict("cas_vit_xs")}, tmp_path / "official.pth")
        with pytest.raises(SystemExit) as status:  # no weights, and those of another model
            main(["export", *source[:1], str(tmp_path / "model.mlpackage"), *source[1:]])
        assert status.value.code == 2
    errors = capsys.readouterr().err
    assert "--random-weights" in errors and "another model" in errors
    assert {p.name for p in tmp_path.iterdir()} == {"random.ONNX", "official.pth"}


def test_bench(tmp_path, capsys, monkeypatch):
    from carelite import benchmark

    grow = benchmark.grow
    monkeypatch.setattr(benchmark, "grow", lambda s: (tmp_path / "benchmark.json").stat() and grow(s))  # written before
    flags = "--models cas_vit_xs --all-forms --image-size 64 --batch 2 --rounds 2 --repeats 1 --warmup 1 --device cpu"
    main(["bench", *flags.split(), "--growth-sizes", "64", "--output", str(tmp_path)])
    assert "| `cas_vit_xs` | 64 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {(row["form"], row["batch"]): row["milliseconds"] for row in result["times"]}
    assert set(rows) == {("eager", 1), ("eager", 2), ("onnxruntime", 1), ("onnxruntime", 2)}
    assert len(rows["eager", 1]) == 2 and all(value > 0 for times in rows.values() for value in times)
    assert result["models"]["cas_vit_xs"]["top1"] == 78.3 and len(result["growth"]) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"benchmark.json", "benchmark.png"}
    assert "benchmark.png" in refused(capsys, "bench", *flags.split(), "--output", str(tmp_path / "benchmark.png"))


@pytest.mark.parametrize(
    "command, message",
    (
        (["evaluate", "nowhere.safetensors"], "nowhere.safetensors"),
        (["train", "--model", "care_s9"], "care_s9"),
        (["train", "--epochs", "0"], "epochs"),
        (["train", "--seed", str(2**64)], "seed"),
        (["train", "--teacher", "resnet18=nowhere.pth"], "nowhere.pth"),
        (["train", "--resume", "nowhere"], "nowhere"),
        (["train", "--data", "folder:nowhere"], "nowhere"),
        (["train", "--preset", "finetune"], "--init"),
        (["train", "--teacher", "runs/care_s0/model.safetensors"], "choose another --output"),
        (["compare", "--init", "runs/compare/care_s1/model.safetensors"], "choose another --output"),
        (["bench-training", "--batch-size", "0"], "batch_size"),
        (["predict", "nowhere.png", "--checkpoint", "nowhere.safetensors"], "nowhere"),
        (["verify", "nowhere.mlpackage", "--checkpoint", "nowhere.safetensors"], "nowhere"),
        (["bench", "--models", "care_s9"], "care_s9"),
        (["bench", "--device", "cuda:99"], "cuda:99"),
    ),
)
def test_bad_input_is_one_clear_line(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *command)
    assert not list(tmp_path.iterdir())


def test_every_command_has_help(capsys):
    for command in ("demo", "train", "evaluate", "predict", "compare", "bench-training", "export", "verify", "bench"):
        with pytest.raises(SystemExit) as status:
            build_parser().parse_args([command, "--help"])
        assert status.value.code == 0 and command in capsys.readouterr().out


def test_python_m_carelite():
    done = subprocess.run([sys.executable, "-m", "carelite", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("carelite ")
