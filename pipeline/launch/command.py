"""The `launch` command: writes the files by which a config runs on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipeline.launch.cost import Forecast
from pipeline.launch.platforms import (
    VOLUME,
    Machines,
    Pods,
    Submission,
    kuberay,
    ray_launcher,
    slurm,
    write,
)
from pipeline.launch.portable import Portable, portable
from pipeline.launch.sizes import Size, size_of
from workers.errors import UserError

# Options of one platform alone, by their names in the parsed arguments.
ONLY_ON = {
    "array": "slurm",
    "image": "kuberay",
    "select": "kuberay",
    "tolerate": "kuberay",
    "service_account": "kuberay",
    "secret": "kuberay",
    "cloud": "ray",
    "spot": "ray",
    "machine_image": "ray",
    "project": "ray",
}
SEEN = {"slurm": None, "kuberay": VOLUME, "ray": ""}  # folder of this machine's disks on the nodes

ForecastOf = Callable[[str, list[str]], Forecast]  # of a config with overrides


def launch(args: argparse.Namespace, forecast_of: ForecastOf) -> int:
    """Write the files for a platform, and print how large the run is and what submits it."""
    for option, platform in ONLY_ON.items():
        if getattr(args, option) and args.on != platform:
            name = option.replace("_", "-")
            raise UserError(f"--{name} is of --on {platform}, not of {args.on}; leave it out")
    run = portable(args.config, args.overrides, SEEN[args.on] or "", SEEN[args.on])
    forecast = None
    note = ""
    if not args.hours:
        try:
            forecast = forecast_of(args.config, args.overrides)
        except UserError as error:  # the nodes may see what this machine does not
            note = f"no forecast: {error}"
    size = size_of(run.config, forecast, args.ranks_per_node, args.hours)
    folder = args.out or f"{run.config.name}-{args.on}"
    submission = submission_on(args, run, size, folder)
    paths = write(submission, folder)
    lines = [f"wrote {', '.join(paths)}", str(size)]
    if note:
        lines.append(note)
    print("\n".join([*lines, "read them, then:", *(f"  {line}" for line in submission.commands)]))
    return 0


def submission_on(args: argparse.Namespace, run: Portable, size: Size, folder: str) -> Submission:
    """Return the files and commands for the platform of the arguments."""
    match args.on:
        case "slurm":
            return slurm(run, size, folder, args.array)
        case "kuberay":
            pods = Pods(
                args.image or Pods.image,
                args.select,
                args.tolerate,
                args.service_account or Pods.account,
                args.secret,
            )
            return kuberay(run, size, folder, pods)
        case _:
            machines = Machines(
                args.cloud or Machines.cloud,
                args.spot,
                args.machine_image,
                args.project or Machines.project,
            )
            return ray_launcher(run, size, folder, machines)
