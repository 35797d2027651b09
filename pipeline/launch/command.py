"""The `launch` command: write files that run a config on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pipeline.launch.cost import Forecast
from pipeline.launch.platforms import (
    VOLUME,
    Machines,
    Pods,
    Submission,
    render_kuberay,
    render_ray_launcher,
    render_slurm,
    write_files,
)
from pipeline.launch.portable import Portable, make_portable
from pipeline.launch.sizes import Size, choose_size
from workers.errors import UserError

# Name of an option in the parsed arguments -> platforms that have this option.
ONLY_ON = {
    "array": ("slurm",),
    "image": ("kuberay",),
    "select": ("kuberay",),
    "tolerate": ("kuberay",),
    "service_account": ("kuberay", "ray"),
    "secret": ("kuberay",),
    "cloud": ("ray",),
    "spot": ("ray",),
    "machine_image": ("ray",),
    "project": ("ray",),
}
SHARED = {"slurm": None, "kuberay": VOLUME, "ray": ""}  # argument `shared` of `make_portable`
# Argument `groups` of `make_portable`: default of `cluster.groups`; 0: none. On a cloud, nodes are
# added on request, so the config must contain the number of groups to request.
GROUPS = {"slurm": 0, "kuberay": 0, "ray": 1}

ForecastOf = Callable[[str, list[str]], Forecast]  # (config, overrides) -> forecast


def launch(args: argparse.Namespace, forecast_of: ForecastOf) -> int:
    """Write the files for a platform. Print the size of the nodes and the commands to submit.

    Args:
        args: Parsed arguments of the command.
        forecast_of: Returns the forecast of a config with overrides. It is not called if the user
            gives the time limit (`--hours`).

    Returns:
        The exit code, 0.

    Raises:
        UserError: If an option does not belong to the platform, or the config cannot run there.
    """
    for option, platforms in ONLY_ON.items():
        if getattr(args, option) and args.on not in platforms:
            name = option.replace("_", "-")
            raise UserError(f"--{name} works only with --on {' or '.join(platforms)}; leave it out")
    if args.project and args.cloud != "gcp":
        raise UserError("--project works only with --cloud gcp; leave it out")
    run = make_portable(args.config, args.overrides, SHARED[args.on], GROUPS[args.on])
    forecast = None
    note = ""
    if not args.hours:
        try:
            forecast = forecast_of(args.config, args.overrides)
        except UserError as error:  # the nodes may have data that this machine lacks
            note = f"no forecast: {error}"
    size = choose_size(run.config, forecast, args.ranks_per_node, args.hours)
    folder = args.out or f"{run.config.name}-{args.on}"
    submission = render_submission(args, run, size, folder)
    paths = write_files(submission, folder)
    lines = [f"wrote {', '.join(paths)}", str(size), f"storage: {run.config.storage}"]
    if note:
        lines.append(note)
    print("\n".join([*lines, "read them, then:", *(f"  {line}" for line in submission.commands)]))
    return 0


def render_submission(
    args: argparse.Namespace, run: Portable, size: Size, folder: str
) -> Submission:
    """Return the files and commands for the platform `args.on`."""
    match args.on:
        case "slurm":
            return render_slurm(run, size, folder, args.array)
        case "kuberay":
            pods = Pods(
                args.image or Pods.image,
                args.select,
                args.tolerate,
                args.service_account or Pods.account,
                args.secret,
            )
            return render_kuberay(run, size, folder, pods)
        case _:
            machines = Machines(
                args.cloud or Machines.cloud,
                args.spot,
                args.machine_image,
                args.project,
                args.service_account,
            )
            return render_ray_launcher(run, size, folder, machines)
