"""The benchmark's arithmetic, its stored run, and the README's figures, which are that run's."""

import json
from pathlib import Path

import pytest
import timm
import torch

import carelite
from carelite.benchmark import PEERS, REPORTED, Settings, prepare_for_inference, ratio, ratio_table, result_table

ROOT = Path(__file__).parents[1]
STORED = json.loads((ROOT / "carelite" / "results" / "benchmark.json").read_text())


def test_the_ratio_is_taken_round_by_round():
    """Both get slower by the same factor: their ratio does not move, as that of the medians would."""
    drift = [1, 2, 4, 8]
    assert ratio({"a": [3 * d for d in drift], "b": drift}, "a", "b") == (3, 3, 3)


def test_the_stored_run_covers_what_it_should():
    assert set(STORED["models"]) == {*carelite.list_models(), *PEERS} == set(REPORTED)
    assert STORED["settings"]["rounds"] >= 5 and STORED["settings"]["image_size"] == 0
    timed = {(row["model"], row["form"]) for row in STORED["times"] if row["batch"] == 1}
    assert {(name, form) for name in REPORTED for form in ("eager", "onnxruntime")} <= timed
    forms = ("trained", "eager", "compiled", "onnxruntime", "onnxruntime trained")
    assert {(name, form) for name in ("care_s0", "cas_vit_xs") for form in forms} <= timed
    for name, (top1, size, source) in REPORTED.items():
        row = STORED["models"][name]
        assert (row["top1"], row["image_size"], row["source"]) == (top1, size, source)
    assert all([row["size"] for row in rows] == list(Settings().growth_sizes) for rows in STORED["growth"].values())


def test_the_readme_has_the_stored_figures():
    readme = (ROOT / "README.md").read_text()
    for table in (result_table(STORED), ratio_table(STORED)):
        assert table in readme, "paste this table into README.md:\n" + table


def test_no_model_is_its_own_peer():
    forms = ("trained", "eager", "compiled", "onnxruntime", "onnxruntime trained")
    rows = [dict(model=m, form=f, batch=1, milliseconds=[1.0]) for m in ("resnet18", "resnet34") for f in forms]
    table = ratio_table(dict(times=rows, models=["resnet18", "resnet34"], settings=dict(all_forms=["resnet18"])))
    assert "| `resnet18` | `resnet34` |" in table and "| `resnet18` | `resnet18` |" not in table


@pytest.mark.parametrize("name", ("repvit_m0_9", "mobilenetv4_conv_medium"))
def test_peers_are_prepared_as_their_authors_meant(name):
    model = timm.create_model(name).eval()
    prepared, how = prepare_for_inference(model, torch.randn(1, 3, 64, 64))
    norms = [
        sum(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in net.modules()) for net in (model, prepared)
    ]
    assert norms[0] > 20 and norms[1] <= 1 and "timm" in how


def test_settings_refuse():
    for fault, message in (
        ({"models": ("care_s9",)}, "care_s9"),
        ({"precision": "int3"}, "int3"),
        ({"rounds": 0}, "1"),
        ({"models": ()}, "models"),
        ({"threads": -1}, "threads"),
        ({"growth_sizes": (64, 33)}, "33"),
        ({"models": ("vit_tiny_patch16_224",), "image_size": 32}, "224 pixels only"),
        ({"device": "cuda:99"}, "cuda:99.*cpu"),
        ({"device": "abacus"}, "abacus"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings(**fault)
