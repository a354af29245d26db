"""Every ablation builds, trains, exports and changes what it says; the tasks are what they claim; the runner."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from carelite import CARE_CONFIGS, ablations
from carelite.__main__ import main
from carelite.ablations import (
    CARE_VARIANTS,
    CAS_VIT_VARIANTS,
    LAG,
    RINGS,
    TASKS,
    VARIANTS,
    ReadFirstToken,
    ablate,
    build_variant,
    count,
    default_plan,
    far_marks,
    generated,
    missing_runs,
    read_results,
    run_ablations,
    textures,
)
from carelite.care import CARE
from carelite.cas_vit import CASViT
from carelite.linear_attention import LinearAttention
from carelite.training import Evaluation
from helpers import fill_in_place, images

RESULTS = Path(__file__).parents[1] / "carelite" / "results" / "ablations.jsonl"
each_variant = pytest.mark.parametrize("name", VARIANTS)


def small(name: str):
    """The small model of a variant with ten classes, filled by the rule."""
    return fill_in_place(build_variant(name, num_classes=10))


# --- what a switch changes, derived by hand for the small models ---

DIMS, CHANNELS = (12, 24, 48), (16, 32, 64)


def interaction(c: int, r: int = 2) -> int:
    return 2 * c + (c + 1) * r * c + 10 * r * c + (r * c + 1) * c  # norm, 1×1, 3×3 depthwise, 1×1


def attention(d: int) -> int:
    return 2 * d * (d + 1)


def learner(stage: int, d1: int) -> int:
    return attention(d1) if stage == 2 else 24 * d1  # strips: 11 weights and a bias, twice


def local(d2: int, *kernels: int) -> int:
    return d2 // len(kernels) * sum(k * k + 1 for k in kernels)


def mixers(change) -> int:
    """What the parameters grow by where stage s has change(s, d) instead of CARE's mixer."""
    return sum(change(s, d) - learner(s, d // 3) - local(2 * d // 3, 3, 7) for s, d in enumerate(DIMS))


CAS_DIMS = (12, 24, 48)
GROWTH = {  # parameters, against the unchanged model
    "care": 0,
    "symmetric": mixers(lambda s, d: learner(s, d // 2) + local(d // 2, 3, 7)),
    "reversed": mixers(lambda s, d: learner(s, 2 * d // 3) + local(d // 3, 3, 7)),
    "stacked": mixers(lambda s, d: 2 * local(d, 3, 7) + learner(s, d)),
    "no_local": mixers(lambda s, d: attention(d)),
    "no_global": mixers(lambda s, d: local(d, 3, 7)),
    "attention_only": mixers(lambda s, d: attention(d)) - 20 * (sum(DIMS) + sum(CHANNELS)),
    "no_inter1": -sum(map(interaction, DIMS)),
    "no_inter2": -sum(map(interaction, CHANNELS[:-1])),
    "no_memory": sum(interaction(d) - interaction(c) for d, c in zip(DIMS[:-1], CHANNELS[:-1])),
    "no_interaction": -sum(map(interaction, DIMS)) - sum(map(interaction, CHANNELS[:-1])),
    "attention_early": sum(attention(d // 3) - 24 * d // 3 for d in DIMS[:-1]),
    "kernel_3": sum(local(2 * d // 3, 3) - local(2 * d // 3, 3, 7) for d in DIMS),
    "kernel_7": sum(local(2 * d // 3, 7) - local(2 * d // 3, 3, 7) for d in DIMS),
    "phi_identity": 0,
    "phi_relu": 0,
    "no_layer_scale": -sum(CHANNELS[:-1]),
    "cas_vit": 0,
    "no_spatial": -2 * sum(10 * c + 2 * c + c for c in CAS_DIMS),
    "no_channel": -2 * sum(c * c for c in CAS_DIMS),
    "no_gamma": -sum(10 * c for c in CAS_DIMS),
    "shared": -sum(10 * c + 2 * c + c + c * c for c in CAS_DIMS),
}


@each_variant
def test_a_switch_changes_the_model_as_it_says(name):
    original = small("care" if name in CARE_VARIANTS else "cas_vit")
    changed = small(name)
    parameters = [sum(p.numel() for p in model.parameters()) for model in (changed, original)]
    assert parameters[0] - parameters[1] == GROWTH[name]
    with torch.inference_mode():
        x = images(2, 64, 96)
        difference = (changed(x) - original(x)).abs().max().item()
    assert difference == 0 if name in ("care", "cas_vit") else difference > 1e-3
    assert changed.num_features == original.num_features  # the heads stay the same


@each_variant
def test_two_training_steps(name):
    torch.manual_seed(0)
    model = build_variant(name, num_classes=10).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = images(4, 64, 64), torch.arange(4)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        assert loss.isfinite()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        optimizer.step()


# One of each kind of change to the exported program; the rest, alike, in `make test-all`.
KINDS = {"stacked", "attention_only", "no_inter2", "no_memory", "no_layer_scale", "phi_identity", "phi_relu"}
KINDS |= {"no_channel", "shared"}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_a_variant_exports(name, tmp_path):
    from carelite.export import export_coreml
    from carelite.verification import verify

    model = small(name)
    package = export_coreml(model, tmp_path / "model.mlpackage", image_size=64, precision="float32")
    pictures = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    report = verify(package, model, pictures)
    assert report.ok, str(report)


@pytest.mark.unchecked
@each_variant
@torch.inference_mode()
def test_fusion_keeps_the_function_of_a_variant(name):
    from carelite.fusion import fuse

    model = small(name)
    x = images(2, 64, 96)
    torch.testing.assert_close(fuse(model)(x), model(x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_without_inter2_or_memory_the_block_does_not_write_the_memory():
    for name, writes in {"care": True, "no_inter2": False, "no_memory": False, "no_interaction": False}.items():
        block = small(name).stages[0].blocks[0]
        x = images(1, 8, 8, channels=16)
        assert torch.equal(block.update(x)[:, :4], x[:, :4]) != writes, name


def test_without_memory_the_features_do_not_read_it():
    for name, reads in {"care": True, "no_memory": False}.items():
        block = small(name).stages[0].blocks[0]
        x = images(1, 8, 8, channels=16).requires_grad_()
        block.update(x)[:, 4:].sum().backward()
        assert bool(x.grad[:, :4].any()) == reads, name


def test_shared_interactions_are_one_module():
    mixer = build_variant("shared").stages[0].blocks[0].mixer
    assert mixer.context_k is mixer.context_q
    assert build_variant("cas_vit").stages[0].blocks[0].mixer.context_k is not mixer.context_q


def heads(model: CARE, stage: int) -> tuple[int, int]:
    """Heads of the attention in the stage's first block, and the width of each."""
    mixer = model.stages[stage].blocks[0].mixer
    attention = getattr(mixer, "global_mixer", mixer)
    return attention.num_heads, attention.qk.in_channels // attention.num_heads


@pytest.mark.parametrize(
    "model, name, stage3, stage4",
    [
        ("care_s0", "care", (2, 16), (2, 32)),
        ("care_s0", "symmetric", (3, 16), (3, 32)),
        ("care_s2", "symmetric", (4, 18), (4, 36)),  # 72/16 and 144/32 are no whole numbers
        ("care_s2", "no_local", (9, 16), (9, 32)),
    ],
)
def test_heads_stay_as_wide_as_they_can(model, name, stage3, stage4):
    with torch.device("meta"):
        built = CARE(dataclasses.replace(CARE_CONFIGS[model], depths=(1, 1, 1, 1)), **VARIANTS[name].parts)
    assert (heads(built, 2), heads(built, 3)) == (stage3, stage4)


@pytest.mark.parametrize("ratio", (1 / 6, 1 / 4, 1 / 3, 1 / 2, 5 / 6))
def test_any_ratio(ratio):
    block = CARE(ablations.SMALL[CARE], mixer=ablations.split_at(ratio)).stages[2].blocks[0]
    assert block.mixer.dims == (round(48 * ratio), 48 - round(48 * ratio))


def test_a_ratio_leaves_channels_to_both_learners():
    with pytest.raises(ValueError, match="0 of 24 channels"):
        ablations.split_at(0.02)(24, 1, LinearAttention, LinearAttention)


def test_unknown_names_are_named(tmp_path):
    with pytest.raises(ValueError, match="no_such(.|\n)*stacked"):
        build_variant("no_such")
    with pytest.raises(ValueError, match="no_such(.|\n)*digits"):
        list(run_ablations([("care", "no_such", 0)], tmp_path / "results.jsonl"))
    assert not list(tmp_path.iterdir())


# --- the generated tasks ---


def test_far_marks():
    pictures, labels = far_marks(400, seed=3)
    cells = pictures.unflatten(3, (11, 16)).unflatten(2, (11, 16)).float()  # (N, 3, 11, 16, 11, 16)
    flat = cells.amax(dim=(3, 5)) == cells.amin(dim=(3, 5))  # cells of one colour
    marks = flat.all(dim=1)  # (N, 11, 11)
    assert marks[:, 0, 0].all() and (marks.sum(dim=(1, 2)) == 2).all()
    marks[:, 0, 0] = False
    index, row, column = marks.nonzero(as_tuple=True)
    rings = torch.tensor(RINGS)[index // 2 % 4]
    assert torch.equal(torch.maximum(row, column), rings)
    first, second = cells[:, :, 0, 0, 0, 0], cells[index, :, row, 0, column, 0]
    assert torch.equal((first == second).all(dim=1), torch.tensor(labels, dtype=torch.bool))
    assert not torch.equal(far_marks(400, seed=4)[0], pictures) and torch.equal(far_marks(400, seed=3)[0], pictures)


def test_one_mark_alone_says_nothing():
    """Each colour in the first place is as often in matching images as in others, within four standard deviations."""
    pictures, labels = far_marks(2000, seed=0)
    labels = torch.tensor(labels)
    for colour in ablations.COLOURS:
        here = (pictures[:, :, 0, 0] == torch.tensor(colour, dtype=torch.uint8)).all(dim=1)
        assert abs(labels[here].float().mean() - 0.5) < 4 * 0.5 / math.sqrt(here.sum())


def test_textures():
    pictures, labels = textures(800, seed=0, flip=0.1)
    squares = (pictures[:, 0, ::4, ::4] > 128).float() * 2 - 1
    labels = torch.tensor(labels)
    moves = {0: (0, LAG), 1: (LAG, 0), 2: (LAG, LAG), 3: (LAG, -LAG)}
    for direction, move in moves.items():
        product = squares * squares.roll(move, dims=(1, 2))
        product = product[:, move[0] :, max(move[1], 0) :]
        for label in range(4):
            expected = 0.8 if label == direction else 0.0  # copies are right nine times out of ten
            assert abs(product[labels == label].mean() - expected) < 0.03
    assert all(abs(squares[labels == label].mean()) < 0.03 for label in range(4))


def test_reading_one_token():
    x = torch.arange(24.0).view(1, 2, 3, 4)
    assert ReadFirstToken()(x).tolist() == [[0.0, 12.0]]


def gradient_reach(name: str, size: int = 176) -> int:
    """The furthest row or column of pixels that the first token of a small model depends on."""
    model = small(name)
    x = images(1, size, size).requires_grad_()
    model.forward_features(x)[:, :, 0, 0].sum().backward()
    return int(x.grad.abs().amax(dim=(0, 1)).nonzero().max())


def test_reach_of_the_first_token():
    assert gradient_reach("no_global") == 155  # less than the furthest mark, whose first pixel is 160
    assert gradient_reach("no_channel") == 127  # what is left of CATM is windows
    assert gradient_reach("cas_vit") == gradient_reach("care") == gradient_reach("attention_only") == 175
    assert 16 * RINGS[-1] > 155 > 16 * RINGS[-2]


@torch.inference_mode()
def test_attention_alone_knows_no_places():
    """Cells of 16×16 pixels may be exchanged: so four of the textures' directions are one to this variant."""
    pictures = images(2, 64, 64)
    cells = pictures.unflatten(3, (4, 16)).unflatten(2, (4, 16)).transpose(3, 4).flatten(2, 3)  # (2, 3, 16, 16, 16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    mixed = cells[:, :, order].unflatten(2, (4, 4)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    for name, same in {"attention_only": True, "no_local": False, "care": False}.items():
        model = small(name)
        assert torch.allclose(model(mixed), model(pictures), atol=1e-4) == same, name


# --- the runner ---

PLAN = [("care", "digits", 0), ("stacked", "digits", 0), ("care", "digits", 1)]


@pytest.fixture
def quick(monkeypatch):
    """No training: `ablate` returns at once and notes its calls."""
    calls = []

    def fake(variant, task, seed):
        calls.append((variant, task, seed))
        return dict(variant=variant, task=task, seed=seed, recipe=TASKS[task].recipe, right=[9], images=[10])

    monkeypatch.setattr(ablations, "ablate", fake)
    return calls


def test_finished_runs_are_not_repeated(quick, tmp_path, monkeypatch):
    path = tmp_path / "results" / "ablations.jsonl"
    runs = run_ablations(PLAN, path, "the command")
    next(runs), runs.close()  # broken off behind the first
    assert quick == PLAN[:1] and len(read_results(path)) == 1
    assert [r["seed"] for r in run_ablations(PLAN, path)] == [0, 1]
    assert quick == PLAN and not list(run_ablations(PLAN, path))
    assert read_results(path)[0]["command"] == "the command"
    task = dataclasses.replace(TASKS["digits"], recipe=TASKS["digits"].recipe | {"epochs": 99})
    monkeypatch.setitem(TASKS, "digits", task)
    assert missing_runs(PLAN, read_results(path)) == PLAN  # another recipe: the old lines do not count


@pytest.mark.parametrize("line", [b'{"variant": "care"', b"{}", b"1", b'{"variant": "\xff"}', None])
def test_a_damaged_file_is_refused(quick, tmp_path, line):
    path = tmp_path / "ablations.jsonl"
    path.write_bytes(line) if line else path.mkdir()
    with pytest.raises((ValueError, OSError), match="ablations.jsonl"):
        list(run_ablations(PLAN, path))
    assert quick == [] and (not line or path.read_bytes() == line)


def test_what_others_wrote_in_the_file_stays(quick, tmp_path):
    path = tmp_path / "ablations.jsonl"
    own = json.dumps(dict(variant="care", task="a task of my own", seed=0, recipe={}))
    path.write_text(own)  # without a newline
    assert len(list(run_ablations([PLAN[0], PLAN[0]], path))) == 1  # asked twice, run once
    assert path.read_text().startswith(own + "\n") and len(read_results(path)) == 2


@torch.inference_mode()
def test_entropy_only_where_there_is_one():
    model = small("phi_relu")
    for layer in [m for m in model.modules() if isinstance(m, LinearAttention)]:
        layer.qk.bias.fill_(-50.0)
    assert ablations.row_entropy(model, images(2, 64, 64)) is None  # all similarities are 0


def test_the_command_line(quick, tmp_path, capsys):
    path = tmp_path / "ablations.jsonl"
    main(["ablate", str(path), "--variants", "care", "stacked", "--tasks", "digits"])
    assert {call[:2] for call in quick} == {("care", "digits"), ("stacked", "digits")}
    command = f"carelite ablate {path} --variants care stacked --tasks digits --seeds 2"
    assert read_results(path)[0]["command"] == command and "9 of 10" in capsys.readouterr().out
    for bad in (["--variants", "no_such"], ["--tasks", "digits", "--seeds", "0"], ["--seeds", "3"]):
        with pytest.raises(SystemExit):
            main(["ablate", str(path), *bad])


def test_a_run_is_what_its_seed_decides(monkeypatch):
    few = lambda: generated(textures, ablations.TEXTURES, train=64, val=32)  # noqa: E731
    task = dataclasses.replace(TASKS["textures"], splits=few, recipe=TASKS["textures"].recipe | {"epochs": 1})
    monkeypatch.setitem(TASKS, "textures", task)
    first, second = ablate("care", "textures", 3), ablate("care", "textures", 3)
    assert first["loss"] == second["loss"] != ablate("care", "textures", 4)["loss"]
    assert first["images"] == [32] and 0 <= first["right"][0] <= 32


def test_far_marks_are_counted_by_ring(monkeypatch):
    """An evaluation that is right in the second ring only."""

    def oracle(model, dataset, batch_size):
        labels = torch.arange(16) % 2
        said = torch.where(torch.arange(16) // 2 % 4 == 1, labels, 1 - labels)
        return Evaluation(F.one_hot(said, 2).float(), labels)

    few = lambda: generated(far_marks, ("differ", "match"), train=32, val=16)  # noqa: E731
    task = dataclasses.replace(TASKS["far marks"], splits=few, recipe=TASKS["far marks"].recipe | {"epochs": 1})
    monkeypatch.setitem(TASKS, "far marks", task)
    monkeypatch.setattr(ablations, "evaluate", oracle)
    line = ablate("no_interaction", "far marks", 0)
    assert line["right"] == [0, 4, 0, 0] and line["images"] == [4, 4, 4, 4]


def test_stored_results_are_complete_and_of_this_code():
    results = read_results(RESULTS)
    assert missing_runs(default_plan(), results) == []
    assert len(results) == len(default_plan())
    for line in results:
        assert line["command"].startswith("carelite ablate") and line["versions"]["torch"]
    for name in VARIANTS:
        line = next(r for r in results if r["variant"] == name and r["task"] == "digits")
        counted = count(build_variant(name, num_classes=10), 32)
        assert {key: line[key] for key in counted} == counted, name


def test_the_defaults_are_the_papers_models():
    assert CARE_VARIANTS["care"].parts == {} and CAS_VIT_VARIANTS["cas_vit"].parts == {}
    assert {v.model for v in CARE_VARIANTS.values()} == {CARE} and VARIANTS["shared"].model is CASViT
    assert json.loads(json.dumps([task.recipe for task in TASKS.values()])) == [task.recipe for task in TASKS.values()]
