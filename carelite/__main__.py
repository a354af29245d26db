"""The command line, `carelite demo | train | evaluate | predict | export | verify | ablate`: `python -m carelite`."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import carelite


def train(args: argparse.Namespace) -> Path:
    """Train on digits into `args.output`; returns the path of the weights."""
    from carelite.data import load_digits_splits
    from carelite.training import TrainConfig, evaluate, train

    config = TrainConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig)})
    folder = Path(args.output or f"runs/{config.model}")
    splits = load_digits_splits(config.image_size)
    start = time.perf_counter()
    model = train(config, splits, folder)
    seconds = time.perf_counter() - start
    result = evaluate(model, splits.val)
    print(f"{config.model}: {seconds:.0f} s of training, {describe(result)}; {folder / 'model.safetensors'}")
    return folder / "model.safetensors"


def describe(result) -> str:
    """An evaluation in words."""
    return f"{result.accuracy:.2%} of {len(result.labels)} held-out digits right, mean loss {result.loss:.3f}"


def evaluate(args: argparse.Namespace) -> None:
    """Print a checkpoint's accuracy on the held-out digits."""
    from carelite.data import load_digits_splits
    from carelite.training import evaluate, load_checkpoint

    model, meta = load_checkpoint(args.checkpoint)
    splits = load_digits_splits(meta.image_size)
    if splits.classes != tuple(meta.classes):
        raise ValueError(f"{args.checkpoint} was trained on the classes {list(meta.classes)}, not on digits.")
    print(f"{args.checkpoint}: {describe(evaluate(model, splits.val))}")


def predict(args: argparse.Namespace) -> None:
    """Print the most likely classes of image files."""
    import torch

    from carelite.data import load_image, normalise
    from carelite.training import load_checkpoint

    model, meta = load_checkpoint(args.checkpoint)
    images = torch.stack([load_image(path, meta.image_size) for path in args.image])
    with torch.inference_mode():
        probabilities = model(normalise(images, meta.mean, meta.std)).softmax(dim=1)
    for path, row in zip(args.image, probabilities):
        best = row.topk(min(5, len(row)))
        print(f"{path}: " + ", ".join(f"{meta.classes[i]} {p:.1%}" for p, i in zip(best.values, best.indices)))


def export(args: argparse.Namespace) -> Path:
    """Export a checkpoint to a Core ML package."""
    from carelite.export import export_coreml
    from carelite.training import load_checkpoint

    model, meta = load_checkpoint(args.checkpoint)
    package = Path(args.package or Path(args.checkpoint).parent / f"{meta.name}.mlpackage")
    export_coreml(
        model,
        package,
        image_size=meta.image_size,
        classes=meta.classes,
        mean=meta.mean,
        std=meta.std,
        precision=args.precision,
    )
    print(f"{package}: {size_of(package) / 1e6:.1f} MB, {args.precision}")
    return package


def verify(args: argparse.Namespace):
    """Check a Core ML package against its checkpoint on the held-out digits; the exit status says the outcome."""
    import torch

    from carelite.data import load_digits_splits
    from carelite.training import load_checkpoint
    from carelite.verification import verify

    model, meta = load_checkpoint(args.checkpoint)
    images = torch.stack([image for image, _ in load_digits_splits(meta.image_size).val])
    report = verify(args.package, model, images, mean=meta.mean, std=meta.std)
    print(report)
    if not report.ok:
        raise SystemExit(1)
    return report


def ablate(args: argparse.Namespace) -> None:
    """Train small ablations, on digits and on generated tasks, and add the runs that a file of results lacks."""
    from carelite.ablations import TASKS, VARIANTS, default_plan, run_ablations

    chosen = {flag: names for flag in ("variants", "tasks") if (names := getattr(args, flag))}
    plan = default_plan()
    if chosen:
        variants, tasks = args.variants or VARIANTS, args.tasks or TASKS
        plan = [(variant, task, seed) for seed in range(args.seeds) for task in tasks for variant in variants]
    flags = [f"--{flag} " + " ".join(map(repr, names)) for flag, names in chosen.items()]
    for line in run_ablations(plan, args.results, " ".join(["carelite ablate", args.results, *flags])):
        print(
            f"{line['variant']} on {line['task']}, seed {line['seed']}: {sum(line['right'])} of {sum(line['images'])}"
        )


def demo(args: argparse.Namespace) -> None:
    """Train CARE-S0 on real digits, evaluate, export in both precisions, verify, and print a table."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from carelite.data import load_digits_splits
    from carelite.training import evaluate, load_checkpoint

    folder = Path(args.output or "runs/demo")
    args.output = folder
    checkpoint = train(args)
    model, meta = load_checkpoint(checkpoint)
    result = evaluate(model, load_digits_splits(meta.image_size).val)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, 3, meta.image_size, meta.image_size))
    rows = [
        ("model", meta.name),
        ("image", f"{meta.image_size} x {meta.image_size}"),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("GMACs per image", f"{counter.get_total_flops() / 2e9:.4f}"),
        ("held-out digits", f"{len(result.labels)}"),
        ("accuracy", f"{result.accuracy:.2%}"),
        ("weights", f"{size_of(checkpoint) / 1e6:.1f} MB"),
    ]
    for precision in ("float16", "float32"):
        suffix = "" if precision == "float16" else "_float32"
        package = folder / f"{meta.name}{suffix}.mlpackage"
        export(argparse.Namespace(checkpoint=checkpoint, package=package, precision=precision))
        report = verify(argparse.Namespace(package=package, checkpoint=checkpoint))
        rows += [
            (f"Core ML, {precision}", f"{size_of(package) / 1e6:.1f} MB"),
            ("  classes equal to PyTorch's", f"{round(report.agreement * report.images)} of {report.images}"),
            ("  largest logit difference", f"{report.difference:.1e}"),
        ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {value:>14}" for name, value in rows))
    print(f"\nEverything is in {folder}: weights, log.jsonl, learning_curve.png and the packages.")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    path = Path(path)
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of TrainConfig, with its default."""
    from carelite.training import TrainConfig

    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default: {field.default}")
    parser.add_argument("--output", help="folder of the run; default: runs/MODEL (demo: runs/demo)")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all its commands."""
    parser = argparse.ArgumentParser(prog="carelite", description=carelite.__doc__)
    parser.add_argument("--version", action="version", version=f"carelite {carelite.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, **kwargs):
        text = function.__doc__.splitlines()[0]
        added = commands.add_parser(function.__name__, help=text, description=text, **kwargs)
        added.set_defaults(run=function)
        return added

    add_training_flags(command(demo))
    add_training_flags(command(train))
    command(evaluate).add_argument("checkpoint", help="model.safetensors of a run")
    predicting = command(predict)
    predicting.add_argument("image", nargs="+", help="image files")
    predicting.add_argument("--checkpoint", required=True, help="model.safetensors of a run")
    exporting = command(export)
    exporting.add_argument("checkpoint", help="model.safetensors of a run")
    exporting.add_argument("package", nargs="?", help="default: MODEL.mlpackage beside the checkpoint")
    exporting.add_argument("--precision", choices=("float16", "float32"), default="float16")
    verifying = command(verify)
    verifying.add_argument("package", help="a saved .mlpackage")
    verifying.add_argument("--checkpoint", required=True, help="the weights it was exported from")
    ablating = command(ablate)
    ablating.add_argument("results", help="file of JSON lines, made or added to")
    ablating.add_argument("--variants", nargs="+", help="default: those that each task is made for")
    ablating.add_argument("--tasks", nargs="+", help="default: all")
    ablating.add_argument(
        "--seeds", type=int, default=2, help="runs of each, where variants or tasks are named; default: 2"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run a command; bad input ends with one line that says what was wrong, and status 2."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        print(f"carelite: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
