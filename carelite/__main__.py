"""The command line: `carelite demo | train | evaluate | predict | export | verify | bench`, or `python -m carelite`."""

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


def load_for_export(args: argparse.Namespace) -> tuple:
    """The model that `args.checkpoint` names, and what is known of it, as keywords of an export."""
    from carelite.training import load_checkpoint

    name = args.model or args.checkpoint
    if getattr(args, "random_weights", False):
        import torch

        torch.manual_seed(0)
        return carelite.create_model(name).eval(), dict(image_size=224, source="random weights, seed 0")
    if name in carelite.list_models() and not args.model:
        raise ValueError(f"{name} is a model and no checkpoint: give a file, or ask for --random-weights.")
    source = Path(args.checkpoint).name
    if args.model:
        return carelite.create_model(name, checkpoint=args.checkpoint).eval(), dict(image_size=224, source=source)
    model, meta = load_checkpoint(args.checkpoint)
    known = {key: getattr(meta, key) for key in ("image_size", "classes", "mean", "std")}
    return model, known | dict(source=source)


def export(args: argparse.Namespace) -> Path:
    """Export a checkpoint to a Core ML package, or to ONNX where the path ends in .onnx."""
    from carelite.export import export_coreml, export_onnx

    model, how = load_for_export(args)
    name = model.pretrained_cfg["architecture"]
    beside = Path() if args.random_weights else Path(args.checkpoint).parent
    path = Path(args.package or beside / f"{name}.mlpackage")
    if args.image_size:
        how["image_size"] = args.image_size
    if args.classes:
        how["classes"] = Path(args.classes).read_text().splitlines()
    if args.pyramid:
        how |= dict(pyramid=True, classes=None)
    if path.suffix == ".onnx":
        if (args.precision, args.compress) != ("float16", None):
            raise ValueError("an ONNX file is float32 and not compressed: leave --precision and --compress out.")
        export_onnx(model, path, **how)
    else:
        export_coreml(model, path, precision=args.precision, compress=args.compress, **how)
    kind = "float32" if path.suffix == ".onnx" else " ".join(filter(None, (args.precision, args.compress)))
    print(f"{path}: {size_of(path) / 1e6:.1f} MB, {kind}, {how['source']}")
    return path


def verify(args: argparse.Namespace):
    """Check a Core ML package against its checkpoint on real images; the exit status says the outcome."""
    from carelite.verification import verify

    model, known = load_for_export(args)
    report = verify(args.package, model, mean=known.get("mean"), std=known.get("std"))
    print(report)
    if not report.ok:
        raise SystemExit(1)
    return report


def bench(args: argparse.Namespace) -> None:
    """Measure models and their peers on this machine; writes benchmark.json and benchmark.png, prints the tables."""
    from carelite.benchmark import Settings, benchmark, plot_benchmark, ratio_table, result_table, save_result

    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    folder = Path(args.output)
    result = benchmark(settings, progress=lambda text: print(text, file=sys.stderr))
    save_result(result, folder / "benchmark.json")
    plot_benchmark(result).savefig(folder / "benchmark.png", dpi=120)
    print(result_table(result), ratio_table(result), sep="\n\n")
    print(f"\nEverything is in {folder}: benchmark.json and benchmark.png.")


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
        export(build_parser().parse_args(["export", str(checkpoint), str(package), "--precision", precision]))
        report = verify(build_parser().parse_args(["verify", str(package), "--checkpoint", str(checkpoint)]))
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


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of the benchmark's Settings, with its default."""
    from carelite.benchmark import Settings

    for field in dataclasses.fields(Settings):
        flag, several = "--" + field.name.replace("_", "-"), isinstance(field.default, tuple)
        kind = type(field.default[0] if several else field.default)
        values = dict(nargs="*") if several else {}
        shown = " ".join(map(str, field.default)) if several else field.default
        parser.add_argument(flag, type=kind, default=field.default, help=f"default: {shown}", **values)
    parser.add_argument("--output", default="runs/bench", help="folder; default: runs/bench")


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
    exporting.add_argument("checkpoint", help="model.safetensors of a run; with --random-weights the name of a model")
    exporting.add_argument("package", nargs="?", help=".mlpackage or .onnx; default: MODEL.mlpackage beside it")
    exporting.add_argument("--random-weights", action="store_true", help="export an untrained model")
    exporting.add_argument("--image-size", type=int, help="in pixels; default: the run's, or 224")
    exporting.add_argument("--classes", help="a file with a label per line; default: the run's, or none (logits alone)")
    exporting.add_argument("--precision", choices=("float16", "float32"), default="float16")
    exporting.add_argument("--compress", choices=("palettize6", "int8"), help="store weights smaller")
    exporting.add_argument("--pyramid", action="store_true", help="put out the maps of the four stages")
    verifying = command(verify)
    verifying.add_argument("package", help="a saved .mlpackage")
    verifying.add_argument("--checkpoint", required=True, help="the weights it was exported from")
    for parser_ in (exporting, verifying):
        parser_.add_argument("--model", help="the model's name, for official files that do not say it themselves")
    add_bench_flags(command(bench))
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
