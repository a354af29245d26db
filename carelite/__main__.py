"""The command line: `carelite demo | train | evaluate | predict | export | verify | …`, also `python -m carelite`."""

import argparse
import dataclasses
import functools
import inspect
import json
import os
import shlex
import sys
from pathlib import Path

import carelite


def configuration(args: argparse.Namespace):
    """The TrainConfig of a preset, a file or a run to resume, with the values given by flags."""
    from carelite.training import PRESETS, TrainConfig, read_config, read_state

    if getattr(args, "resume", None):
        base = read_state(Path(args.resume, "state.pt"))["config"]
    else:
        base = read_config(args.config) if args.config else PRESETS[args.preset or "quick"]
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.preset == "finetune" and not given.get("init"):
        raise ValueError("the preset finetune starts from a checkpoint: name it with --init.")
    if base.warmup_epochs and 0 < (epochs := given.get("epochs", 0)) < base.epochs:  # a shorter run, a shorter warm-up
        given.setdefault("warmup_epochs", max(1, round(base.warmup_epochs * epochs / base.epochs)))
    if base.max_size and "image_size" in given and not {"min_size", "max_size"} & given.keys():  # drawn around it
        for name in ("min_size", "max_size"):
            part = round(getattr(base, name) * given["image_size"] / base.image_size / 32)
            given[name] = 32 * max(1, part)
    return dataclasses.replace(base, **given)


def splits_of(config):
    """The images that a TrainConfig names."""
    from carelite.data import load_splits

    return load_splits(
        config.data,
        config.image_size,
        seed=config.seed,
        skip_faults=config.skip_faults,
        train_images=config.train_images,
    )


def train(args: argparse.Namespace) -> Path:
    """Train a model into --output, or go on with the run in --resume; returns the path of the weights."""
    from carelite.training import check_place, read_log, train

    resume = getattr(args, "resume", None)
    if resume and args.output:
        raise ValueError("--resume goes on in its own folder: leave --output out.")
    config = configuration(args)
    folder = Path(resume or args.output or f"runs/{config.model}")
    check_place(config, folder)
    train(config, splits_of(config), folder, resume=bool(resume))
    if int(os.environ.get("RANK", 0)) == 0:
        last = read_log(folder)[-1]
        print(
            f"{config.model}: {last['seconds']:.0f} s of training, {last['val_accuracy']:.2%} of {last['val_images']} "
            f"held-out images right, mean loss {last['val_loss']:.3f}; {folder / 'model.safetensors'}"
        )
    return folder / "model.safetensors"


def evaluate(args: argparse.Namespace) -> None:
    """Print a checkpoint's accuracy on held-out images, in all and by class, and draw its confusion matrix."""
    from carelite.data import load_test_images
    from carelite.training import evaluate, load_checkpoint, plot_confusion, read_config

    checkpoint = Path(args.checkpoint)
    model, meta = load_checkpoint(checkpoint)
    beside = checkpoint.parent / "config.json"
    config = read_config(beside) if beside.is_file() else None
    if not (args.data or config):
        raise ValueError(f"there is no {beside} to say what {checkpoint} was trained on: name the images with --data.")
    data, skip = args.data or config.data, args.skip_faults or bool(config and config.skip_faults)
    own = bool(config) and same_data(data, config.data)
    images, what = load_test_images(data, meta.image_size, meta.classes, own=own, skip_faults=skip)
    result = evaluate(model, images, workers=config.workers if config else 0)
    print(
        f"{checkpoint}: {result.accuracy:.2%} of {len(result.labels)} {what} right, "
        f"{result.top(5):.2%} among the top five, mean loss {result.loss:.3f}"
    )
    rows = list(zip(result.class_accuracy.tolist(), result.confusion.sum(dim=1).tolist(), meta.classes))
    for accuracy, count, name in sorted(row for row in rows if row[1])[:20]:
        print(f"  {accuracy:7.2%} of {count:5d}  {name}")
    if without := [name for _, count, name in rows if not count]:
        print(f"  no held-out images: {', '.join(without)}")
    if len(meta.classes) > 20:
        print(f"  … the 20 worst of {len(meta.classes)} classes")
    picture = Path(args.figure or checkpoint.parent / "confusion.png")
    plot_confusion(result, meta.classes).savefig(picture, dpi=120)
    print(f"confusion matrix: {picture}")


def same_data(one: str, other: str) -> bool:
    """Whether two values of `data` name the same images: the same word, or the same folder."""
    from carelite.data import kind_and_path

    (kind, path), (other_kind, other_path) = kind_and_path(one), kind_and_path(other)
    return kind == other_kind and Path(path).resolve() == Path(other_path).resolve()


def predict(args: argparse.Namespace) -> None:
    """Print the five most likely classes of image files, or of all image files in folders."""
    import torch

    from carelite.data import image_files, load_image, normalise
    from carelite.training import load_checkpoint

    model, meta = load_checkpoint(args.checkpoint)
    paths = [path for name in args.image for path in (image_files(name) if Path(name).is_dir() else [Path(name)])]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"no image file at {', '.join(missing)}.")
    if not paths:
        raise FileNotFoundError(f"no image files in {', '.join(args.image)}.")
    unreadable = 0
    for path in paths:
        try:
            image = load_image(path, meta.image_size)
        except ValueError as error:
            print(error, file=sys.stderr)
            unreadable += 1
            continue
        with torch.inference_mode():
            probabilities = model(normalise(image[None], meta.mean, meta.std)).softmax(dim=1)[0]
        best = probabilities.topk(min(5, len(probabilities)))
        print(f"{path}: " + ", ".join(f"{meta.classes[i]} {p:.1%}" for p, i in zip(best.values, best.indices)))
    if unreadable:
        raise ValueError(f"{unreadable} of {len(paths)} images could not be read.")


def compare(args: argparse.Namespace) -> None:
    """Train models with one recipe and write what came out to a JSON file; goes on where it was interrupted."""
    import platform

    import timm
    import torch

    from carelite.training import (
        FREE,
        TrainConfig,
        check_place,
        is_finished,
        is_of,
        load_checkpoint,
        read_log,
        train,
        write_text,
    )

    config, path = configuration(args), Path(args.results)
    if path.is_dir():
        raise ValueError(f"--results {path} is a folder: name a file in it.")
    output, names = Path(args.output or "runs/compare"), args.models or carelite.list_models()
    for name in names:
        check_place(config, output / name)
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(TrainConfig)}
    own = ("model", *FREE)  # what does not belong to the recipe
    flags = [f"--{n.replace('_', '-')} {value}" for n, value in given.items() if value is not None and n not in own]
    recipe = {name: value for name, value in dataclasses.asdict(config).items() if name not in own}
    report = dict(command=" ".join(["carelite compare", *flags]), recipe=recipe, models={})
    if path.is_file():
        try:
            report = json.loads(path.read_text())
            other = report["recipe"] != recipe or not isinstance(report["models"], dict)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is no file of results: name another one with --results.") from error
        if other:
            raise ValueError(f"{path} holds results of another recipe: name another file with --results.")
    report["versions"] = dict(torch=torch.__version__, timm=timm.__version__, python=platform.python_version())
    splits = splits_of(config)
    if not all(is_of(entry["log"], splits) for entry in report["models"].values()):
        raise ValueError(f"{path} holds results on other images: name another file with --results.")
    for name in names:
        folder, own_config = output / name, dataclasses.replace(config, model=name)
        if name in report["models"]:
            continue
        if not is_finished(folder, own_config, splits):
            resume = (folder / "state.pt").is_file()  # an interrupted comparison goes on
            train(own_config, splits, folder, resume=resume)
        model, _ = load_checkpoint(folder / "model.safetensors")
        parameters = sum(p.numel() for p in model.parameters())
        report["models"][name] = dict(parameters=parameters, log=read_log(folder))
        write_text(path, json.dumps(report, indent=1) + "\n")
    for name, entry in report["models"].items():
        last = entry["log"][-1]
        print(f"{name:<12}{last['val_accuracy']:8.2%} of {last['val_images']} after {last['seconds']:6.0f} s")


def bench_training(args: argparse.Namespace) -> None:
    """Print images per second and peak memory of training: memory layouts, with and without the data pipeline."""
    import multiprocessing
    import tempfile
    from concurrent.futures import ProcessPoolExecutor

    from carelite.training import measure_training

    if not args.config:  # a recipe for photographs; batches that one process can hold
        args.preset, args.batch_size = args.preset or "care", 32 if args.batch_size is None else args.batch_size
        args.workers = 1 if args.workers is None else args.workers
    config = configuration(args)
    print(f"{config.model}, {config.image_size} x {config.image_size}, batches of {config.batch_size}, "
          f"{config.workers} workers, {args.steps} steps")  # fmt: skip
    print(f"{'layout':<16}{'data pipeline':<16}{'images/s':>9}{'peak memory (MiB)':>20}")
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            photographs(Path(folder), config.batch_size)
            config = dataclasses.replace(config, data=f"folder:{folder}")
        for last in (False, True):
            for pipeline in (False, True):
                # a process for each, for the peak is that of a process
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    rate, memory = pool.submit(
                        measure_training,
                        config,
                        splits_of(config),
                        channels_last=last,
                        pipeline=pipeline,
                        steps=args.steps,
                    ).result()
                names = "channels_last" if last else "default", "with" if pipeline else "without"
                print(f"{names[0]:<16}{names[1]:<16}{rate:>9.1f}{memory:>20,.0f}", flush=True)


def photographs(folder: Path, batch_size: int) -> None:
    """Write JPEG files of 500 x 375 pixels, parts of scikit-learn's two photographs, in two class folders."""
    import random

    from PIL import Image
    from sklearn.datasets import load_sample_image

    draw = random.Random(0)
    for name in ("china", "flower"):
        photo = Image.fromarray(load_sample_image(f"{name}.jpg"))  # 640 x 427
        (folder / name).mkdir()
        for i in range(2 * batch_size):
            left, top = draw.randrange(140), draw.randrange(52)
            photo.crop((left, top, left + 500, top + 375)).save(folder / name / f"{i}.jpg", quality=90)


def read_labels(path: str) -> list[str]:
    """The lines of a text file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def load_for_export(args: argparse.Namespace) -> tuple:
    """The model that `args.checkpoint` names, and what is known of it, as keywords of an export."""
    from carelite.training import load_checkpoint

    labels = dict(classes=read_labels(args.classes)) if args.classes else {}
    name = args.model or args.checkpoint
    if getattr(args, "random_weights", False):
        import torch

        torch.manual_seed(0)
        return carelite.create_model(name).eval(), dict(image_size=224, source="random weights, seed 0") | labels
    if name in carelite.list_models() and not args.model:
        raise ValueError(f"{name} is a model and no checkpoint: give a file, or ask for --random-weights.")
    source = Path(args.checkpoint).name
    try:
        model, meta = load_checkpoint(args.checkpoint)
    except ValueError:
        if not args.model:
            raise
        model = carelite.create_model(name, checkpoint=args.checkpoint).eval()
        return model, dict(image_size=224, source=source) | labels
    if args.model not in (None, meta.name):
        raise ValueError(f"{args.checkpoint} says that it is of {meta.name}, not of {args.model}: leave --model out.")
    known = {key: getattr(meta, key) for key in ("image_size", "classes", "mean", "std")}
    return model, known | dict(source=source) | labels


def export(args: argparse.Namespace) -> Path:
    """Export a checkpoint to a Core ML package, or to ONNX where the path ends in .onnx."""
    from carelite.export import export_coreml, export_onnx

    if args.pyramid and args.classes:
        raise ValueError("a pyramid has no classes: leave --classes or --pyramid out.")
    model, how = load_for_export(args)
    name = model.pretrained_cfg["architecture"]
    beside = Path() if args.random_weights else Path(args.checkpoint).parent
    path = Path(args.package or beside / f"{name}.mlpackage")
    if args.image_size is not None:
        how["image_size"] = args.image_size
    if args.pyramid:
        how |= dict(pyramid=True, classes=None)
    onnx = path.suffix.lower() == ".onnx"
    if onnx:
        if (args.precision, args.compress) != ("float16", None):
            raise ValueError("an ONNX file is float32 and not compressed: leave --precision and --compress out.")
        export_onnx(model, path, **how)
    else:
        export_coreml(model, path, precision=args.precision, compress=args.compress, **how)
    kind = "float32" if onnx else " ".join(filter(None, (args.precision, args.compress)))
    print(f"{path}: {size_of(path) / 1e6:.1f} MB, {kind}, {how['source']}")
    return path


def verify(args: argparse.Namespace):
    """Check a Core ML package against its checkpoint on real images; the exit status says the outcome."""
    from carelite.verification import verify

    model, known = load_for_export(args)
    known = {name: known.get(name) for name in ("mean", "std", "classes")}
    report = verify(args.package, model, **known)
    print(report)
    if not report.ok:
        raise SystemExit(1)
    return report


def bench(args: argparse.Namespace) -> None:
    """Measure models and their peers on this machine; writes benchmark.json and benchmark.png, prints the tables."""
    from carelite.benchmark import Settings, benchmark, plot_benchmark, ratio_table, result_table, save_result

    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    keep = functools.partial(save_result, path=folder / "benchmark.json")
    result = benchmark(settings, lambda text: print(text, file=sys.stderr), keep)
    keep(result)
    plot_benchmark(result).savefig(folder / "benchmark.png", dpi=120)
    print(result_table(result), ratio_table(result), sep="\n\n")
    print(f"\nEverything is in {folder}: benchmark.json and benchmark.png.")


def ablate(args: argparse.Namespace) -> None:
    """Train small ablations, on digits and on generated tasks, and add the runs that a file of results lacks."""
    from carelite.ablations import TASKS, VARIANTS, default_plan, run_ablations

    chosen = {flag: names for flag in ("variants", "tasks") if (names := getattr(args, flag))}
    plan, seeds = default_plan(), 2 if args.seeds is None else args.seeds
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: there is nothing to run; give 1 or more.")
    if chosen:
        variants, tasks = args.variants or VARIANTS, args.tasks or TASKS
        plan = [(variant, task, seed) for seed in range(seeds) for task in tasks for variant in variants]
        chosen["seeds"] = [str(seeds)]
    elif args.seeds:
        raise ValueError("--seeds goes with --variants or --tasks; alone it would change what the stored runs are.")
    flags = [part for flag, names in chosen.items() for part in (f"--{flag}", *names)]
    for line in run_ablations(plan, args.results, shlex.join(["carelite", "ablate", args.results, *flags])):
        print(
            f"{line['variant']} on {line['task']}, seed {line['seed']}: {sum(line['right'])} of {sum(line['images'])}"
        )


def demo(args: argparse.Namespace) -> None:
    """Train CARE-S0 on real digits, evaluate, export in both precisions, verify, and print a table."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from carelite import verification
    from carelite.training import evaluate, load_checkpoint

    folder, config = Path(args.output or "runs/demo"), configuration(args)
    args.output = folder
    (folder / "state.pt").unlink(missing_ok=True)  # a demo that was stopped begins anew
    checkpoint = train(args)
    model, meta = load_checkpoint(checkpoint)
    held_out = splits_of(config).val
    result, images = evaluate(model, held_out), torch.stack([image for image, _ in held_out])
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, 3, meta.image_size, meta.image_size))
    rows = [
        ("model", meta.name),
        ("image", f"{meta.image_size} x {meta.image_size}"),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("GMACs per image", f"{counter.get_total_flops() / 2e9:.4f}"),
        ("held-out images", f"{len(result.labels)}"),
        ("accuracy", f"{result.accuracy:.2%}"),
        ("weights", f"{size_of(checkpoint) / 1e6:.1f} MB"),
    ]
    for precision in ("float16", "float32"):
        suffix = "" if precision == "float16" else "_float32"
        package = folder / f"{meta.name}{suffix}.mlpackage"
        export(build_parser().parse_args(["export", str(checkpoint), str(package), "--precision", precision]))
        report = verification.verify(package, model, images, mean=meta.mean, std=meta.std, classes=meta.classes)
        print(report)
        if not report.ok:
            raise SystemExit(1)
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


def add_training_flags(parser: argparse.ArgumentParser, resume: bool = False) -> None:
    """A preset, a configuration file or a run to resume, and a flag for every field of TrainConfig."""
    from carelite.training import PRESETS, TrainConfig

    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--preset", choices=PRESETS, help="the recipe to start from; default: quick (bench-training: care)"
    )
    source.add_argument("--config", help="config.json of an earlier run, instead of a preset")
    if resume:
        source.add_argument("--resume", metavar="FOLDER", help="go on with the interrupted run in this folder")
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, inspect.cleandoc(TrainConfig.__doc__)
    for field in dataclasses.fields(TrainConfig):
        values = ", ".join(f"{name} {getattr(preset, field.name)!r}" for name, preset in PRESETS.items())
        kind = dict(action=argparse.BooleanOptionalAction) if field.type is bool else dict(type=field.type)
        parser.add_argument("--" + field.name.replace("_", "-"), help=values, **kind)
    parser.add_argument(
        "--output", help="folder of the run; default: runs/MODEL (demo: runs/demo, compare: runs/compare/MODEL)"
    )


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of the benchmark's Settings, with its default."""
    from carelite.benchmark import Settings

    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, inspect.cleandoc(Settings.__doc__)
    for field in dataclasses.fields(Settings):
        flag, several = "--" + field.name.replace("_", "-"), isinstance(field.default, tuple)
        kind = type(field.default[0] if several else field.default)
        values = dict(nargs="*") if several else {}
        shown = " ".join(map(str, field.default)) if several else field.default
        parser.add_argument(flag, type=kind, default=field.default, help=f"default: {shown}", **values)
    parser.add_argument("--output", default="runs/bench", help="folder; default: runs/bench")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all its commands."""
    parser = argparse.ArgumentParser(prog="carelite", description=carelite.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"carelite {carelite.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, **kwargs):
        text = function.__doc__.splitlines()[0]
        added = commands.add_parser(function.__name__.replace("_", "-"), help=text, description=text, **kwargs)
        added.set_defaults(run=function)
        return added

    add_training_flags(command(demo))
    add_training_flags(command(train), resume=True)
    evaluating = command(evaluate)
    evaluating.add_argument("checkpoint", help="model.safetensors of a run")
    evaluating.add_argument(
        "--data", help="digits, fashion_mnist or folder:PATH (all of it); default: what the run held out"
    )
    evaluating.add_argument("--skip-faults", action="store_true", default=None, help="leave unreadable files out")
    evaluating.add_argument("--figure", help="the confusion matrix; default: confusion.png beside the checkpoint")
    predicting = command(predict)
    predicting.add_argument("image", nargs="+", help="image files, or folders of them")
    predicting.add_argument("--checkpoint", required=True, help="model.safetensors of a run")
    comparing = command(compare)
    add_training_flags(comparing)
    comparing.add_argument("--models", nargs="+", choices=carelite.list_models(), help="default: all")
    comparing.add_argument("--results", default="runs/compare/results.json", help="default: runs/compare/results.json")
    benching = command(bench_training)
    add_training_flags(benching)
    benching.add_argument("--steps", type=int, default=10, help="steps to measure; default: 10")
    exporting = command(export)
    exporting.add_argument("checkpoint", help="model.safetensors of a run; with --random-weights the name of a model")
    exporting.add_argument("package", nargs="?", help=".mlpackage or .onnx; default: MODEL.mlpackage beside it")
    exporting.add_argument("--random-weights", action="store_true", help="export an untrained model")
    exporting.add_argument("--image-size", type=int, help="in pixels; default: the run's, or 224")
    exporting.add_argument("--precision", choices=("float16", "float32"), default="float16")
    exporting.add_argument("--compress", choices=("palettize6", "int8"), help="store weights smaller")
    exporting.add_argument("--pyramid", action="store_true", help="put out the maps of the four stages")
    verifying = command(verify)
    verifying.add_argument("package", help="a saved .mlpackage")
    verifying.add_argument("--checkpoint", required=True, help="the weights it was exported from")
    for parser_ in (exporting, verifying):
        parser_.add_argument("--classes", help="a file with a label per line; default: the run's, or none")
        parser_.add_argument("--model", help="the model's name, for official files that do not say it themselves")
    add_bench_flags(command(bench))
    ablating = command(ablate)
    ablating.add_argument("results", help="file of JSON lines, made or added to")
    ablating.add_argument("--variants", nargs="+", help="default: those that each task is made for")
    ablating.add_argument("--tasks", nargs="+", help="default: all")
    ablating.add_argument("--seeds", type=int, help="runs of each of the named variants and tasks; default: 2")
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
